"""EAGLE speculative decoding around replay copies: fields, models, graphs, runners and the loop."""

from lib.eagle.fields import DraftBatch, DraftExtendBatch, EagleConfig
from lib.eagle.runners import EagleDraftCudaGraphRunner, EagleDraftExtendCudaGraphRunner
