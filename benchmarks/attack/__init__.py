"""What strangers without a GPU can do to a run: real volunteers, one attack at a time, and a twin that nobody attacks.

- `strangers.py`: the attacks. Each is a client of the protocol with keys of its own, in a process of its own.
- `twins.py`: one run with or without a stranger, and what it left on disk.
- `__main__.py`: the command, its table and its JSON.
"""
