"""Images: what sandboxes are made of. Archives and images of registries come in, read-only layers and names come out.

Owns the blobs below ``<state>/images``, the tables ``images``, ``image_names`` and ``image_conversions`` of the Store, and the routes below
``/v1/images``. Knows nothing of sandboxes but which layers they hold, and mounts nothing.
"""

from dsec.images.environments import Environment
from dsec.images.image_store import ImageStore
from dsec.images.limits import ImportLimits
from dsec.images.registry_access import RegistryPolicy

__all__ = ["Environment", "ImageStore", "ImportLimits", "RegistryPolicy"]
