"""Blobs: bytes named by their digest, moved in ranges within limits of bandwidth."""
