"""Report: what a sharded model takes, exactly, before it is trained: buffers, padding, transient memory and traffic.

``explain`` reads facts off a live model; ``report_of`` makes the report from facts alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dbuffer import BufferPlacement
from torch import nn

from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.facts import AxisFacts, GroupFacts, ModelFacts, UnitFacts, Visit, VisitKind
from megatron_fsdp.forecast import Forecast, Issue, Peak, Phase, forecast_step
from megatron_fsdp.module import FsdpModule, units_below
from megatron_fsdp.parameter_group import ParameterGroup
from megatron_fsdp.report_text import report_text
from megatron_fsdp.unit import Unit

