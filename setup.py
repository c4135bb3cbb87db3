"""What pyproject.toml cannot say: the shipped `configs/` go along as `megahead/configs`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["megahead*"]), "megahead.configs", "megahead.configs.deepspeed"],
    package_dir={"megahead.configs": "configs"},
    include_package_data=False,  # what is named here, and nothing that the sdist happens to hold beside it
    package_data={
        "megahead": ["py.typed"],
        "megahead.report": ["template/*"],
        "megahead.configs": ["*.yaml"],
        "megahead.configs.deepspeed": ["*.json"],
    },
)
