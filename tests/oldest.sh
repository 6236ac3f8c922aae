#!/usr/bin/env bash
# Tests of loops, features and ZeRO-3 with the oldest releases that setup.cfg admits: bash tests/oldest.sh
# They stand in an environment of their own, .cache/oldest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=.cache/oldest
[ -x $environment/bin/python ] || "${PYTHON:-python3}" -m venv $environment
pip() { $environment/bin/python -m pip -qq --disable-pip-version-check "$@"; }
if [ ! "$environment/installed" -nt setup.cfg ]; then
    pip install torch==2.13.0
    pip install --editable '.[train]' deepspeed==0.18.9 transformers==5.6.0 accelerate==1.12.0 \
        pytest pytest-timeout datasets hypothesis peft scipy torchdata
    touch $environment/installed
fi
# DeepSpeed 0.18.9 imports torch's inductor where torch 2.13 warns of its own use of torch.jit.
$environment/bin/python -m pytest --quiet -p no:cacheprovider -m "not slow" \
    -W 'ignore:`torch.jit.script_method` is deprecated:DeprecationWarning' \
    tests/integration/loops/test_plain_loop.py tests/integration/models/test_features.py tests/integration/trainer/test_trainer.py \
    tests/integration/trainer/test_accelerate.py tests/integration/zero/test_zero3.py tests/integration/zero/test_rare_parameters.py \
    tests/unit/test_framework_surface.py
