"""Bytes between machines: calls, signed records and blobs, over libp2p or in memory."""
