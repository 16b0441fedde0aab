"""OpenDSec, the platform: apiserver, edge and image store, and the ``dsec`` command. Clients need only :mod:`libdsec`."""
