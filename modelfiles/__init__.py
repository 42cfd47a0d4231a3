"""What a model's files say, without torch: config, tensors, tokenizer, chat template, generation defaults."""

from modelfiles.chat_messages import ChatCall, ChatMessage, ChatTool
from modelfiles.chat_template import ChatTemplate, RenderedChat, TemplateError
from modelfiles.config import GenerationDefaults, ModelConfig, RopeScaling
from modelfiles.errors import ModelFileError
from modelfiles.model import ModelFiles, open_model
from modelfiles.template_traits import TemplateTraits, traits_of
from modelfiles.tokenizer import Tokenizer

__all__ = [
    "ChatCall",
    "ChatMessage",
    "ChatTemplate",
    "ChatTool",
    "GenerationDefaults",
    "ModelConfig",
    "ModelFileError",
    "ModelFiles",
    "RenderedChat",
    "RopeScaling",
    "TemplateError",
    "TemplateTraits",
    "Tokenizer",
    "open_model",
    "traits_of",
]
