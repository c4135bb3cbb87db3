"""Backbones: six families, made of the layers here, and their tensor-parallel form."""
