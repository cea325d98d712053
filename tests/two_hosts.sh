# Two hosts, left and right, joined by one link: sh two_hosts.sh RATE BURST LEFT_CORES RIGHT_CORES; until stdin closes.
#
#   left: 10.71.0.1, half of the cores                    right: 10.71.0.2, the other half
#   [network, name, /dev/shm] ---link0---(tbf)===(tbf)---link0--- [network, name, /dev/shm]
#
# Runs as process 1 of PID and mount namespaces of its own (hosts.py). When that process ends, however it ends, the kernel
# kills every process of both hosts, and with the last one go the mounts, the networks and the link. So nothing has a name
# outside, and nothing is left to clean up, also after SIGKILL.
set -e
trap '' CHLD                                           # orphans come to process 1; ignored children need no wait()

mount -t tmpfs none /run
cat > /run/host <<'END'
#!/bin/sh
# host NAME COMMAND...: run a command there. Open MPI tells nodes apart by their host names and shares memory by files.
name=$1; shift
exec ip netns exec "$name" unshare --uts --ipc sh -ec '
    hostname "$0"; mount -t tmpfs none /dev/shm; export TMPDIR=/dev/shm
    exec taskset --cpu-list "$(cat /run/cores.$0)" "$@"' "$name" "$@"
END
cat > /run/agent <<'END'
#!/bin/sh
# agent NAME COMMAND: what ssh is to mpirun. As with ssh the environment stays behind, except the tag of the test's job.
name=$1; shift
exec env -i HOME="$HOME" PATH="$PATH" MPITRAIN_TEST_JOB="$MPITRAIN_TEST_JOB" /run/host "$name" sh -c "$*"
END
chmod +x /run/host /run/agent
printf '127.0.0.1 localhost\n10.71.0.1 left\n10.71.0.2 right\n' > /run/hosts
mount --bind /run/hosts /etc/hosts

ip netns add left
ip netns add right
ip -n left link add link0 type veth peer name link0 netns right
address=1
for name in left right; do
    ip -n $name address add 10.71.0.$address/24 dev link0
    ip -n $name link set lo up
    ip -n $name link set link0 up
    # The queue holds 50 ms: a flow fills it and is slowed by waiting, not by losses.
    tc -n $name qdisc add dev link0 root tbf rate "$1" burst "$2" latency 50ms
    address=$((address + 1))
done
echo "$3" > /run/cores.left
echo "$4" > /run/cores.right
echo ready
exec cat
