# pyright: strict, reportUnknownMemberType=false
# The public names: read by type checkers, and by `__init__.py` when a name is first used.

from .attention import paged_attention as paged_attention
from .attention import paged_prefill_attention as paged_prefill_attention
from .cascade import cascade_attention as cascade_attention
from .cascade import merge_attention as merge_attention
from .cascade import num_shared_blocks as num_shared_blocks
from .kv_dtypes import quantise as quantise
from .linear import grouped_linear as grouped_linear
from .op import BACKENDS as BACKENDS
from .op import backend_for as backend_for
from .op import check_backend_runs_on as check_backend_runs_on
from .op import choose_backend as choose_backend
from .padding import padded_head_dim as padded_head_dim
from .platforms import load_cpu_kernels as load_cpu_kernels
from .pools import Pools as Pools
from .ragged import ragged_paged_attention as ragged_paged_attention
from .writing import copy_blocks as copy_blocks
from .writing import paged_rope_write as paged_rope_write
from .writing import paged_write as paged_write
from .writing import write_kv_pages as write_kv_pages
