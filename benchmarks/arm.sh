#!/usr/bin/env bash
# Runs gradfilter-device on a 64-bit ARM userland under emulation: that it works there, not how fast.
#
#   benchmarks/arm.sh [PYTHON] [FOLDER]
#
# PYTHON has gradfilter[export] (default: python3), FOLDER keeps the userland (default: a new
# one). Needs Debian's qemu-user-static and debootstrap, and root to install them and to debootstrap;
# QEMU=PATH takes another qemu-aarch64.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-python3}
folder=${2:-$(mktemp -d)}
root=$folder/root
qemu=${QEMU:-qemu-aarch64-static}

for tool in "$qemu" debootstrap; do
    command -v "$tool" >/dev/null || apt-get -qq install -y qemu-user-static debootstrap
done

# The wheels of ONNX Runtime after 1.20 crash on import under the emulator of Debian 12 (7.2), not
# under that of Debian 13 (10.0).
runtime=onnxruntime
emulator=$("$qemu" --version | sed -nE 's/.* version ([0-9]+).*/\1/p')
[ "$emulator" -ge 10 ] || runtime=onnxruntime==1.20.1

# The first stage alone: the second needs programs of the userland to start each other, which wants
# binfmt_misc. One process of Python can do without.
if [ ! -e "$root/usr/bin/python3.11" ]; then
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3 bookworm "$root" \
        http://deb.debian.org/debian
    for package in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
fi

if [ ! -e "$folder/site/onnxruntime" ]; then
    platforms=()
    for p in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
        platforms+=(--platform "${p}_aarch64")
    done
    "$python" -m pip install --quiet --target "$folder/site" "${platforms[@]}" \
        --python-version 3.11 --only-binary=:all: numpy pillow $runtime
fi

# A small network and a few pictures, made by PyTorch here.
rm -rf "$folder/made"
PYTHONPATH=$here/src:$here/tests "$python" - "$folder/made" <<'PYTHON'
import sys
from pathlib import Path

import test_device
import tiny

from gradfilter.export import onebyone

onebyone.LARGE = 4096  # bytes: so that some of it goes image by image, as in a real network
made = Path(sys.argv[1])
photos = tiny.photographs(made / "photos", each=10)
test_device.exported(made / "exported", photos)
PYTHON

device() {
    "$qemu" -cpu cortex-a72 -L "$root" -E PYTHONHOME="$root/usr" \
        -E PYTHONPATH="$folder/site:$here/device/src" -E OPENBLAS_NUM_THREADS=1 \
        "$root/usr/bin/python3.11" "$@"
}

device -c 'import platform, onnxruntime; print(platform.machine(), "ONNX Runtime", onnxruntime.__version__)'
device -m gradfilter_device self-test --model "$folder/made/exported" --threads 1
device -m gradfilter_device train "$folder/made/photos" --model "$folder/made/exported" --threads 1
device -m gradfilter_device status --model "$folder/made/exported"
echo "passed; the userland is in $folder"
