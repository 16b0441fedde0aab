"""Benchmarks: one module a claim, A/B in one run against the real peer, one JSON line at the end.

``python -m bench`` lists them, ``python -m bench NAME [--quick]`` runs one. Each starts a service of its own (and a dockerd of its own
where the claim is about docker), is its client through libdsec as a trainer would be, counts from outside, and leaves nothing behind.
"""
