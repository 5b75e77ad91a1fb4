"""The one compiled part: frames of Atari games. Without a C compiler the package works all the same, with numpy."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "phalanx.envs._frames",
            ["phalanx/envs/frames.c"],
            extra_compile_args=["-O3", "-fno-fast-math"],  # exact, whatever CFLAGS say
            optional=True,
        )
    ]
)
