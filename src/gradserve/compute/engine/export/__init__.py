"""Checkpoints -> files that other programs load.

run, module_run        the way in, for language models and for modules
peft_folder, merged, gguf_file (with gguf_tokenizer)   formats of language models
module_folder, onnx_file                               formats of modules
parity, module_parity  what is compared with what the engine computes
placing                a folder appears whole and checked, or not at all
"""
