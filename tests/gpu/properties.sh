# The kernel properties in 8 processes, since compiling the layouts is what costs: `bash tests/gpu/properties.sh DIR` from the root.
. tests/gpu/path.sh
out=$1; t=tests/gpu/test_kernel_properties.py
for i in 0 1 2 3 4 5 6 7; do
    nodes=""
    for n in $i $((i + 8)) $((i + 16)); do nodes="$nodes $t::test_random_steps[$n] $t::test_replays_give_the_bits_of_a_run[$n]"; done
    [ $i = 0 ] && nodes="$nodes $t::test_a_fault_is_caught"
    timeout 200 python3 -P -m pytest -q -p no:cacheprovider --durations=6 $nodes > "$out/properties-$i.log" 2>&1 &
done
wait
tail -qn 1 "$out"/properties-?.log
