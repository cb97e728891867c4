"""FC profiles: what they hold, how they are read and written, and the ones this package ships."""

from fasa_compile.profiles.files import load_profile, shipped_profiles
from fasa_compile.profiles.schema import (
    SCHEMA_VERSION,
    Budget,
    FCProfile,
    LayerProfile,
    ModelFacts,
    RopeFacts,
    check_layer,
)

__all__ = [
    "SCHEMA_VERSION",
    "Budget",
    "FCProfile",
    "LayerProfile",
    "ModelFacts",
    "RopeFacts",
    "check_layer",
    "load_profile",
    "shipped_profiles",
]
