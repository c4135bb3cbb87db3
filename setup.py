"""What pyproject.toml cannot say: the shipped `configs/` go along as `megahead/configs`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["megahead*"]), "megahead.configs", "megahead.configs.deepspeed"],
    package_dir={"megahead.configs": "configs"},
    package_data={
        "megahead": ["py.typed"],
        "megahead.report": ["template/*"],
        "megahead.configs": ["*.yaml"],
        "megahead.configs.deepspeed": ["*.json"],
    },
)
