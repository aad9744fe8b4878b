//! Mistakes of users, with their messages.

/// Start of a configuration with two controllers; the text that follows is in the second.
pub const TWO: &str = "\
[[controller]]
socket = \"a.sock\"
serial = \"S\"
[[controller.namespace]]
volume = \"mem://1M\"
[[controller]]
socket = \"b.sock\"
";

/// Command lines (those of `serve` without the command's name), the lines of `c.toml` after
/// [`TWO`], and the exit status with the message.
pub const MISTAKES: &str = r##"
# Values of options.
$ -s s mem://1M --cpus 3-0
2 error: invalid value '3-0' for '--cpus <LIST>': the range 3-0 ends before it begins
$ -s s mem://1M --cpus 0-x
2 error: invalid value '0-x' for '--cpus <LIST>': "0-x" is neither a CPU's number nor a range like 0-3
$ -s s mem://1M --workers 300
2 error: invalid value '300' for '--workers <N>': 300 is not in 1..=256
$ -s s mem://1M --socket-mode 999
2 error: invalid value '999' for '--socket-mode <MODE>': a mode is three octal digits, such as 0660: read 4 and write 2, of owner, group and others
$ -s s mem://1M --socket-mode 0444
2 error: invalid value '0444' for '--socket-mode <MODE>': nobody could connect with this mode: connecting needs the right to write, as in 0660
$ -s s mem://1M --socket-owner no-such-user
1 vnvme: socket-owner: there is no user "no-such-user" on this machine; name one that "getent passwd" shows, or make it with: useradd no-such-user
$ -s s mem://1M --socket-group no-such-group
1 vnvme: socket-group: there is no group "no-such-group" on this machine; name one that "getent group" shows, or make it with: groupadd no-such-group
$ -s s mem://1M --socket-owner 4294967295
1 vnvme: socket-owner: 4294967295 is not a valid number of a user or group
$ -s s mem://1M --write-cache=maybe
2 error: invalid value 'maybe' for '--write-cache[=<on|off>]'
$ -s s mem://1M --no-write-cache --write-cache
2 error: the argument '--no-write-cache' cannot be used with '--write-cache[=<on|off>]'
$ -s s mem://1M --io-queues 129
1 vnvme: io-queues is 129: 1 to 128 are allowed
$ -s s mem://1M --cmb-size 3M
1 vnvme: cmb-size is 3145728: a power of two from 4 KiB to 64 MiB is allowed
$ -s s mem://1M --cmb-size much
2 error: invalid value 'much' for '--cmb-size <SIZE>': a size begins with a whole number, such as 512M, 1G or 64KiB
$ -s s mem://1M --queue-entries 1000
1 vnvme: queue-entries is 1000: a power of two from 2 to 4096 is allowed
$ -s s mem://1M --serial 012345678901234567890
1 vnvme: serial "012345678901234567890": at most 20 printable ASCII characters are allowed
$ -s s mem://1M?nsid=7 mem://1M?nsid=7
1 vnvme: the namespace ID 7 is given twice
$ --config
2 error: a value is required for '--config <FILE>' but none was supplied
$ --config c.toml mem://1M
2 error: the argument '--config <FILE>' cannot be used with '[VOLUME]...'
$ --config none.toml
1 vnvme: none.toml: no such configuration file; name one that exists, or write it (the manual page vnvme.toml(5) lists its keys)
$ -s none/s mem://1M
1 vnvme: none/s: the folder none does not exist; make it with: mkdir -p none
$ -s disk.raw mem://1M
1 vnvme: disk.raw: exists and is not a socket; choose another path for the socket
$
2 vnvme: nothing to serve. Name
# Volumes.
$ -s s mem://1M?iops=fast
1 vnvme: mem://1M?iops=fast: option iops=fast: a number of requests per second is expected, such as 5000 or 5k, or 0 for no limit
$ -s s mem://1M?bps=fast
1 vnvme: mem://1M?bps=fast: option bps=fast: a size begins with a whole number, such as 512M, 1G or 64KiB
$ -s s disk.raw?offset=2M
1 vnvme: disk.raw?offset=2M: byte 2097152 does not lie within the volume's 1048576 bytes
$ -s s disk.raw?offset=512K&length=1M
1 vnvme: disk.raw?offset=512K&length=1M: a slice of 1048576 bytes from byte 524288 does not lie within the volume's 1048576 bytes
$ -s s disk.raw?nsdi=1
1 vnvme: disk.raw?nsdi=1: option "nsdi" is unknown, did you mean "nsid"?
$ -s s mem://1M?block_size=512
1 vnvme: mem://1M?block_size=512: option "block_size" is unknown, did you mean "block-size"?
$ -s s disk.raw?locks=off
1 vnvme: disk.raw?locks=off: option "locks" is unknown, did you mean "lock"?; file volumes have read-only, direct, lock, block-size, format, atomic, atomic-journal, copy, timeout, offset, length, partition, partlabel, partuuid, luks, luks-header, luks-discard, iops, read-iops, write-iops, bps, read-bps, write-bps, burst, weight, share-depth
$ -s s disk.raw?weight=0
1 vnvme: disk.raw?weight=0: option weight=0: a number from 1 on is expected (weights go up to 10000, depths to 4096)
$ -s s mem://1M?burst=50
1 vnvme: mem://1M?burst=50: option burst=50: the unit is missing: ns, us, ms or s
$ -s s mem://1M?iops=5&iops=6
1 vnvme: mem://1M?iops=5&iops=6: option "iops" is given twice
$ -s s mem://1M?read-only=perhaps
1 vnvme: mem://1M?read-only=perhaps: option read-only=perhaps: it is on or off
$ -s s mem://1M?block-size=1K
1 vnvme: mem://1M?block-size=1K: block-size=1K: a whole number is expected without a unit, 1024
# Files of configuration, behind their parser.
$ -c c.toml
| serial = "S"
| [[controller.namespace]]
| volume = "mem://1M"
1 vnvme: c.toml, line 8, controller b.sock: the serial number S is given twice
$ -c c.toml
| [[controller.namespace]]
| volume = "disk.raw?offset=2M"
1 vnvme: c.toml, line 9, controller b.sock: disk.raw?offset=2M: byte 2097152 does not lie within the volume's 1048576 bytes
$ -c c.toml
| [[controller.namespace]]
| volume = "mem://1M"
| [[controller.namespace]]
| volume = "mem://1M?iops=fast"
1 vnvme: c.toml, line 11, controller b.sock, namespace 2: mem://1M?iops=fast: option iops=fast: a number of requests per second is expected, such as 5000 or 5k, or 0 for no limit
$ -c c.toml
| cmb-size = "8G"
| [[controller.namespace]]
| volume = "mem://1M"
1 vnvme: c.toml, line 8, controller b.sock: cmb-size is 8589934592: a power of two from 4 KiB to 64 MiB is allowed
$ -c c.toml
| io-queues = 199
| [[controller.namespace]]
| volume = "mem://1M"
1 vnvme: c.toml, line 8, controller b.sock: io-queues is 199: 1 to 128 are allowed
$ -c c.toml
| [[controller.namespace]]
| volume = "mem://1M"
| block-size = 1000
1 vnvme: c.toml, line 10, controller b.sock: mem://1M: a block size of 1000 bytes is not possible for a namespace: it is 512 or 4096
$ -c c.toml
| [[controller.namespace]]
| volume = "mem://1M"
| nguid = "12"
1 vnvme: c.toml, line 10, controller b.sock: nguid "12": 32 hexadecimal digits are needed
$ -c c.toml
| namespace = []
1 vnvme: c.toml, line 6, controller b.sock: no volume to serve
$ -c c.toml
| socket-group = "no-such-group"
| [[controller.namespace]]
| volume = "mem://1M"
1 vnvme: c.toml, line 7, controller b.sock: socket-group: there is no group "no-such-group" on this machine; name one that "getent group" shows, or make it with: groupadd no-such-group
$ -c c.toml
| [[controller.namespace]]
| volume = "mem://1M"
| [[vhost-user-blk]]
| socket = "a.sock"
| volume = "mem://1M"
1 vnvme: c.toml, line 11, vhost-user-blk a.sock: the socket a.sock is given twice
$ -c c.toml
| [[controller.namespace]]
| volume = "none.raw"
1 vnvme: c.toml, line 9, controller b.sock: none.raw: no such file; create a raw disk with: truncate -s 1G none.raw
# Disks that share a namespace.
$ -c c.toml
| subsystem = "s"
| [[controller.namespace]]
| volume = "mem://1M"
1 vnvme: c.toml, line 8, controller b.sock: a disk with subsystem needs cntlid, a number unique in the subsystem
$ -c c.toml
| [[controller.namespace]]
| volume = "mem://1M"
| reservations = "r"
1 vnvme: c.toml, line 10, controller b.sock: reservations needs a disk with subsystem
$ -c c.toml
| subsystem = "s"
| cntlid = 1
| namespace = [{ volume = "mem://1M" }]
| [[controller]]
| socket = "c.sock"
| subsystem = "s"
| cntlid = 2
| [[controller.namespace]]
| volume = "mem://2M"
1 vnvme: c.toml, line 16, controller c.sock: namespace 1 differs from that of another disk in the subsystem s: a shared namespace needs the same options in both
$ -c c.toml
| subsystem = "s"
| cntlid = 1
| [[controller.namespace]]
| volume = "mem://1M"
| reservations = "c.toml"
1 vnvme: c.toml, line 11, controller b.sock: reservations of namespace 1: c.toml: not a reservation file: it has 220 bytes instead of 32768
# In the parser.
$ -c c.toml
| io_queues = 3
| [[controller.namespace]]
| volume = "mem://1M"
1 unknown field `io_queues`, did you mean `io-queues`? expected one of `name`, `socket`, `socket-owner`, `socket-group`, `socket-mode`, `doorbells`, `shadow-doorbells`, `cmb-size`, `boot-partition`, `write-cache`, `model`, `cloud`, `serial`, `firmware`, `subnqn`, `subsystem`, `cntlid`, `host-id`, `io-queues`, `queue-entries`, `mdts`, `max-namespaces`, `pool`, `pool-capacity`, `pool-block-size`, `incoming`, `namespace`
$ -c c.toml
| socket-mode = 432
| [[controller.namespace]]
| volume = "mem://1M"
1 socket-mode: 432: a mode is text, such as "0660"
$ -c c.toml
| write-cache = 1
| [[controller.namespace]]
| volume = "mem://1M"
1 write-cache: 1: true or false is expected
$ -c c.toml
| [[controller.namespace]]
| volume = "mem://1M"
| [process]
| cpus = [0, "x"]
1 cpus: "x" is neither a CPU's number nor a range like 0-3
# Other commands.
$ bench disk.raw --runtime 5x
2 error: invalid value '5x' for '--runtime <TIME>': the unit is unknown; known are us, ms, s, m, h and d
$ bench disk.raw --size 200%
2 error: invalid value '200%' for '--size <SIZE>': a part is a whole number from 1% to 100%
$ bench disk.raw --rw trim --verify
1 vnvme: --verify: blocks after trim have no pattern to check; use another --rw
$ ublk mem://1M --no-write-cache
2 error: unexpected argument '--no-write-cache' found
$ list --control disk.raw
1 vnvme: disk.raw: this is not a socket (is vnvme running? Name its control socket with --control PATH)
$ list --control none/ctl
1 vnvme: none/ctl: no control socket exists here (is vnvme running? Name its control socket with --control PATH)
$ list --control
2 error: a value is required for '--control <PATH>' but none was supplied
$ list all
2 error: unexpected argument 'all' found
$ daemon mem://1M
2 error: unexpected argument 'mem://1M' found
$ daemon --config none.toml
1 vnvme: none.toml: no such configuration file; name one that exists, or write it (the manual page vnvme.toml(5) lists its keys)
$ check none.toml
1 vnvme: none.toml: no such configuration file; name one that exists, or write it (the manual page vnvme.toml(5) lists its keys)
$ apply none.toml
1 vnvme: none.toml: no such configuration file; name one that exists, or write it (the manual page vnvme.toml(5) lists its keys)
$ detach a first
2 error: invalid value 'first' for '<NSID>': a whole number is expected; vnvme show NAME lists the namespace IDs
$ detach a 0
2 error: invalid value '0' for '<NSID>': 0 is not in 1..=4294967295; vnvme show NAME lists the namespace IDs
$ limits a --weight heavy
2 error: invalid value 'heavy' for '--weight <N>': a whole number is expected
$ bench disk.raw --iodepth 1k
2 error: invalid value '1k' for '--iodepth <N>': a whole number is expected without a unit, 1024
$ -s s mem://1M --io-queues many
2 error: invalid value 'many' for '--io-queues <N>': a whole number is expected
$ -s s mem://1M --io-queues -1
2 error: unexpected argument '-1' found
$ resize a 5X
2 error: invalid value '5X' for '<SIZE>': the unit is unknown; known are K, M, G, T, P (powers of 1024), KiB, ..., and KB, ... (1000)
$ add disk mem://1M
2 error: invalid value 'disk' for '<KIND>'
$ add controller socket=q.sock
2 vnvme: the disk has no volume: name a path or URL
$ add controller mem://1M
2 vnvme: the disk has no socket: add socket=..., for example socket=/run/vnvme/vm0.sock
$ add nvme-tcp mem://1M
2 vnvme: the disk has no listen: add listen=..., for example listen=127.0.0.1:4420
$ add controller socket=q.sock io-queues=many mem://1M
2 vnvme: io-queues=many: a whole number is expected
$ -s s mem://1M --cpus 1023
1 vnvme: --cpus: CPU 1023 does not exist, or this process may not use it; it may use CPUS
$ -c c.toml
| [controller.namespace]
| volume = "mem://1M"
1 [controller.namespace] is one table, and there may be several; write [[controller.namespace]] with two brackets
$ -c c.toml
| [[controller.namespace]]
| volume = "mem://1M"
| block-size = "4k"
1 block-size: "4k": a whole number is expected without a unit, 4096
$ -c c.toml
| [[controller.namespace]]
| volume = "mem://1M"
| block-size = "4096"
1 block-size: "4096": write 4096 without quotation marks
$ check empty.toml
1 vnvme: empty.toml: describes no disk; add a table [[controller]], [[vhost-user-blk]], [[nvme-tcp]] or [[ublk]], with a volume (docs/reference.md has the keys)
$ -c empty.toml
1 vnvme: empty.toml: describes no disk; add a table [[controller]], [[vhost-user-blk]], [[nvme-tcp]] or [[ublk]], with a volume (docs/reference.md has the keys)
$ info none.raw
1 vnvme: none.raw: no such file; create a raw disk with: truncate -s 1G none.raw
$ -s s mem:4G
1 vnvme: mem:4G: no such file; did you mean mem://4G?
$ -s s disk.raw?format=qcow3
1 vnvme: disk.raw?format=qcow3: option format=qcow3: it is raw, qcow2 or probe
$ -c c.toml
| serial = " x"
| [[controller.namespace]]
| volume = "mem://1M"
1 vnvme: c.toml, line 8, controller b.sock: serial " x": begins with a space, which hosts show differently; remove it
$ add controller socket=q.sock io_queues=9 mem://1M
2 vnvme: io_queues=9: unknown key, did you mean io-queues=9? (Write ./io_queues=9 for a volume of that name.)
$ attach a mem://1M Nsid=2
2 vnvme: Nsid=2: unknown key, did you mean nsid=2? (Write ./Nsid=2 for a volume of that name.)
$ serv -s s mem://1M
2 error: unrecognized subcommand 'serv'
$ stats --jsn
2 error: unexpected argument '--jsn' found
$ top --interval 0
2 error: invalid value '0' for '--interval <DURATION>': the unit is missing: ns, us, ms or s
$ -s s mem://1M --metrics 9469
2 error: invalid value '9469' for '--metrics <ADDRESS:PORT>': an IP address and a port are expected, like 127.0.0.1:9469 or [::1]:9469
$ -s s mem://1M --log-format xml
2 error: invalid value 'xml' for '--log-format <FORMAT>'
"##;

/// First words of a command line, besides none.
pub const COMMANDS: &[&str] = &[
    "add", "apply", "attach", "bench", "check", "daemon", "detach", "info", "limits", "list",
    "resize", "serv", "stats", "top", "ublk",
];

/// Requests that a daemon refuses, and their messages; the exit status is 1. DIR is the folder that
/// it may open files in.
pub const REFUSED: &str = r##"
$ show x
vnvme: no disk is called "x"; vnvme list shows the names
$ show A
vnvme: no disk is called "A"; vnvme list shows the names
$ remove x
vnvme: no disk is called "x"; vnvme list shows the names
$ limits x --iops 5
vnvme: no disk is called "x"; vnvme list shows the names
$ path x --set direct
vnvme: no disk is called "x"; vnvme list shows the names
$ suspend x
vnvme: this process drives no device: only nvme:// and vfio-user:// volumes do
$ attach x mem://1M
vnvme: no disk is called "x"; vnvme list shows the names
$ attach b mem://1M
vnvme: "b" is no controller, and only controllers have namespaces that come and go; for another volume, remove the disk and add it again: vnvme remove b
$ attach a mem://lots
vnvme: size "lots" in mem://lots: a size begins with a whole number, such as 512M, 1G or 64KiB
$ attach a DIR/none.raw
vnvme: DIR/none.raw: no such file; create a raw disk with: truncate -s 1G DIR/none.raw
$ attach a none.raw
vnvme: none.raw: the sandbox keeps this process from opening it: it is not below a folder that the option allow of [process] names, which allows DIR; add the folder there, and start the daemon again
$ attach a mem://1M nsid=1
vnvme: "a" has a namespace 1 already
$ attach a mem://1M nsid=99
vnvme: namespace 99: this controller has room for namespaces 1 to 16; max-namespaces gives it more when it starts
$ attach a mem://1M nsd=2
vnvme: unknown field `nsd`, did you mean `nsid`? expected one of `volume`, `read-only`, `block-size`, `on-read-error`, `on-write-error`, `nsid`, `nguid`, `eui64`, `uuid`, `path`, `reservations`, `zone-size`, `zone-capacity`, `max-open-zones`, `max-active-zones`, `zrwa-size`, `zrwa-granularity`, `zrwa-resources`, `zone-table`, `fdp-handles`, `fdp-unit`, `fdp-table`, `metadata`, `metadata-size`, `metadata-extended`, `protection`, `guard`, `protection-first`, `storage-tag`, `storage-tag-mask`, `format-file`, `ana-group`, `ana-state`
$ detach a 7
vnvme: "a" has no namespace 7; vnvme show a lists its namespaces
$ detach b 1
vnvme: "b" is no controller, and only controllers have namespaces that come and go; for another volume, remove the disk and add it again: vnvme remove b
$ resize a 2M
vnvme: namespace 1: its size cannot be changed: only whole files can be resized
$ resize a 2M --nsid 5
vnvme: "a" has no namespace 5; vnvme show a lists its namespaces
$ resize f 1000
vnvme: namespace 1: DIR/disk.raw: size of 1000 bytes is not a multiple of 512 bytes; extend it with: truncate -s %512 DIR/disk.raw
$ add controller socket=DIR/a.sock mem://1M
vnvme: a disk "a" is there already; choose another name, or remove that disk first
$ add controller socket=DIR/none/q.sock mem://1M
vnvme: DIR/none/q.sock: the folder DIR/none does not exist; make it with: mkdir -p DIR/none
$ add controller socket=/none/q.sock mem://1M
vnvme: /none/q.sock: the sandbox keeps this process from opening it: it is not below a folder that the option allow of [process] names, which allows DIR; add the folder there, and start the daemon again
$ add controller socket=DIR/disk.raw mem://1M
vnvme: DIR/disk.raw: exists and is not a socket; choose another path for the socket
$ add controller socket=DIR/q.sock io-queues=199 mem://1M
vnvme: io-queues is 199: 1 to 128 are allowed
$ add ublk mem://1M
vnvme: ublk: block devices of the host can only be added where the sandbox was told so: write allow = ["ublk", ...] into [process], and start the daemon again
$ apply none.toml
vnvme: none.toml: no such configuration file; name one that exists, or write it (the manual page vnvme.toml(5) lists its keys)
$ apply more.toml
vnvme: DIR/none.raw: no such file; create a raw disk with: truncate -s 1G DIR/none.raw; nothing was changed
$ save DIR/none/save.toml
vnvme: DIR/none/save.toml: No such file or directory (os error 2)
$ list --control DIR/a.sock
vnvme: DIR/a.sock: this is the socket of a disk, not a control socket; name the control socket with --control PATH
$ list --control DIR/b.sock
vnvme: DIR/b.sock: this is the socket of a disk, not a control socket; name the control socket with --control PATH
"##;
