"""The demo: an environment of three layers and 64 rollouts at once, each in a sandbox of its own.

Owns the scripted task (``workspace/``, ``toolkit/``), the rollouts and what is shown of them, and :mod:`~dsec.demo.instance` and
:mod:`~dsec.demo.footprint`, by which benchmarks and tests start a service of their own and count what it holds. It is a client like any
other: it reaches sandboxes through libdsec only.
"""
