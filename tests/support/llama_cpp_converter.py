"""llama.cpp's own converter on a small checkpoint, in a process of its own: `CONVERTER FOLDER OUTPUT.gguf`.

CONVERTER is a folder with its `convert_hf_to_gguf.py`. A vocabulary of any checkpoint is written as GPT-2's, because
the converter tells published ones by what they make of a text, and small random ones are not among them.
"""

import json
import sys
from pathlib import Path

source, folder, output = map(Path, sys.argv[1:])
sys.path[:0] = [str(source / "gguf-py"), str(source)]

import convert_hf_to_gguf  # noqa: E402
from conversion.base import ModelBase, TextModel, get_model_architecture  # noqa: E402


def _every(of: type) -> list[type]:
    return [of, *(deeper for below in of.__subclasses__() for deeper in _every(below))]


hparams = ModelBase.load_hparams(folder, False)
if hparams["model_type"] == "nemotron_h":  # transformers' class names numbers of experts where there are none
    hparams = json.loads((folder / "config.json").read_text())
    ModelBase.load_hparams = staticmethod(lambda *_, **__: {**hparams})
convert_hf_to_gguf.get_model_class(get_model_architecture(hparams, convert_hf_to_gguf.ModelType.TEXT))
TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
for model in _every(TextModel):
    model.no_mtp = True  # a checkpoint of transformers has no layer that drafts
    model.set_vocab = TextModel._set_vocab_gpt2
sys.argv = ["convert", str(folder), "--outfile", str(output), "--outtype", "f32"]
convert_hf_to_gguf.main()
