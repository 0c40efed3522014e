"""What setup.cfg cannot say: a wheel has the folder `experiments` inside the package.

At its top it would collide with folders of that name of other people.  What a build makes on its
way is removed: a folder `build` in the clone would be imported by `python -m build`.
"""

import tempfile

from setuptools import find_packages, setup

made_on_the_way = tempfile.TemporaryDirectory()

experiments = find_packages(include=["experiments*"])
setup(
    packages=[
        *find_packages(include=["sparse_dataflow*"]),
        *(f"sparse_dataflow.{name}" for name in experiments),
    ],
    options={"build": {"build_base": made_on_the_way.name}},
    package_dir={f"sparse_dataflow.{name}": name.replace(".", "/") for name in experiments},
)
