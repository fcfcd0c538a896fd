"""Servers under load: ours and llama-server, each a process of its own, asked over loopback by one client program."""
