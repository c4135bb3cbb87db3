"""Backbones: gpt_neox, llama, bert, modernbert, made of the layers here, and their tensor-parallel form."""
