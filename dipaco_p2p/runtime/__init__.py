"""Plumbing that the volunteer and the coordinator both need: it joins the rules, the method and the swarm."""
