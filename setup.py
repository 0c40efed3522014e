"""What setup.cfg cannot say: a wheel has the folder `experiments` inside the package.

At its top it would collide with folders of that name of other people.
"""

from setuptools import find_packages, setup

experiments = find_packages(include=["experiments*"])
setup(
    packages=[
        *find_packages(include=["sparse_dataflow*"]),
        *(f"sparse_dataflow.{name}" for name in experiments),
    ],
    package_dir={f"sparse_dataflow.{name}": name.replace(".", "/") for name in experiments},
)
