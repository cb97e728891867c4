"""Correctness checks for models under ``fasa_compile``, and what the package's own tests are made of.

``oracle``               a decode step in float64 NumPy
``steps``                random decode steps, and the kernels against their specification
``step_checks``          what must hold for one decode step, for any implementation
``plain``                sparse decode in an uncompiled model: the plain reference
``strategies``           Hypothesis strategies
``hypothesis_profiles``  ``ci`` and ``nightly``

``strategies`` and ``hypothesis_profiles`` need ``hypothesis`` (``pip install fasa-compile[testing]``); nothing else here imports it.
"""
