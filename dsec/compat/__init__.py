"""Other people's interfaces, served by this platform. Each module stands alone and knows only :mod:`libdsec`."""
