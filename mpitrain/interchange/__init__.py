"""Models of other frameworks in, ours out: file formats and the names of arrays in them.

    from mpitrain.interchange import bring_in, load_state_dict, state_dict
"""

from mpitrain.interchange.importing import bring_in, load_state_dict
from mpitrain.interchange.names import state_dict

__all__ = ["bring_in", "load_state_dict", "state_dict"]
