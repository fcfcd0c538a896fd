"""Decodes on GPU and CPU together: one token of each of some sequences.

`device_ops` and `host_ops` have the operations of each side; `schedule` joins them into a flat list of calls, which is
made once from the plan.
"""
