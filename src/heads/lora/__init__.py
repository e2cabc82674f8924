from .accelerate import AccelerationReport, accelerate_lora_, restore_lora_
from .functional import lora_linear, lora_linears
from .linear import LoraLinear
