"""What setup.cfg cannot say: a wheel has the folder `experiments` inside the package.

At its top it would collide with folders of that name of other people.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["sparse_dataflow*"]), "sparse_dataflow.experiments"],
    package_dir={"sparse_dataflow.experiments": "experiments"},
)
