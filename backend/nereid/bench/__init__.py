"""Benchmarks: Nereid's engine against the machine's own limits, and against other engines on the same requests.

Always holds: whatever is compared gets the same token ids, at the same times, and runs in turn with the others.
"""
