# Source it to import fasa_compile from this checkout where nothing can be installed: `. tests/gpu/path.sh`, then
# `python3 -P -m pytest -q -m gpu tests/gpu`. It lays the package out under build/mapped, in links, as the wheel would.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
mapped=$root/build/mapped
rm -rf "$mapped" && mkdir -p "$mapped/fasa_compile"
ln -s "$root"/fasa_compile/* "$root"/patterns "$root"/profiles "$root"/triton_kernels "$mapped/fasa_compile/"
export PYTHONPATH=$mapped${PYTHONPATH:+:$PYTHONPATH}
