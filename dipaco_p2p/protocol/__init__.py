"""The rules between peers: pure state machines and documents. No torch, no asyncio, no clock, no network."""
