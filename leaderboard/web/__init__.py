"""The public site: pages, API and static export, all made from one Snapshot."""
