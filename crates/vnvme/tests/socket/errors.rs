//! What people do wrong, each with the whole message and the exit status. [`crate::mistakes`] has
//! more, by their words.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use vfio_user::client::{Client, ClientError};

use crate::common::*;

/// A mistake: the arguments (after `serve` if they do not name a command), what `c.toml` says, the
/// exit status, and the message.
struct Mistake(&'static str, &'static str, i32, &'static str);

/// Two controllers; what is between them is in the second.
const TWO: &str = "\
[[controller]]
socket = \"a.sock\"
serial = \"S\"
[[controller.namespace]]
volume = \"mem://1M\"
[[controller]]
socket = \"b.sock\"
";

const MISTAKES: &[Mistake] = &[
    // Values of options.
    Mistake(
        "-s s mem://1M --cpus 3-0",
        "",
        2,
        "error: invalid value '3-0' for '--cpus <LIST>': the range 3-0 ends before it begins",
    ),
    Mistake(
        "-s s mem://1M --cpus 0-x",
        "",
        2,
        "error: invalid value '0-x' for '--cpus <LIST>': \"0-x\" is neither a CPU's number nor a \
         range like 0-3",
    ),
    Mistake(
        "-s s mem://1M --workers 300",
        "",
        2,
        "error: invalid value '300' for '--workers <N>': 300 is not in 1..=256",
    ),
    Mistake(
        "-s s mem://1M --socket-mode 999",
        "",
        2,
        "error: invalid value '999' for '--socket-mode <MODE>': a mode is three octal digits, such \
         as 0660: read 4 and write 2, of owner, group and others",
    ),
    Mistake(
        "-s s mem://1M --socket-mode 0444",
        "",
        2,
        "error: invalid value '0444' for '--socket-mode <MODE>': nobody may connect: that needs \
         the right to write, as in 0660",
    ),
    Mistake(
        "-s s mem://1M --socket-owner no-such-user",
        "",
        1,
        "vnvme: there is no user \"no-such-user\" on this machine",
    ),
    Mistake(
        "-s s mem://1M --socket-group no-such-group",
        "",
        1,
        "vnvme: there is no group \"no-such-group\" on this machine",
    ),
    Mistake(
        "-s s mem://1M --socket-owner 4294967295",
        "",
        1,
        "vnvme: 4294967295 is no number of a user or group",
    ),
    Mistake(
        "-s s mem://1M --write-cache=maybe",
        "",
        2,
        "error: invalid value 'maybe' for '--write-cache[=<on|off>]'",
    ),
    Mistake(
        "-s s mem://1M --no-write-cache --write-cache",
        "",
        2,
        "error: the argument '--no-write-cache' cannot be used with '--write-cache[=<on|off>]'",
    ),
    Mistake(
        "-s s mem://1M --io-queues 65",
        "",
        1,
        "vnvme: io-queues is 65: 1 to 64 are allowed",
    ),
    Mistake(
        "-s s mem://1M --queue-entries 1000",
        "",
        1,
        "vnvme: queue-entries is 1000: a power of two from 2 to 4096 is allowed",
    ),
    Mistake(
        "-s s mem://1M --serial 012345678901234567890",
        "",
        1,
        "vnvme: serial \"012345678901234567890\": at most 20 printable ASCII characters are \
         allowed",
    ),
    Mistake(
        "-s s mem://1M?nsid=7 mem://1M?nsid=7",
        "",
        1,
        "vnvme: the namespace ID 7 is given twice",
    ),
    Mistake(
        "--config",
        "",
        2,
        "error: a value is required for '--config <FILE>' but none was supplied",
    ),
    Mistake(
        "--config c.toml mem://1M",
        "",
        2,
        "error: the argument '--config <FILE>' cannot be used with '[VOLUME]...'",
    ),
    Mistake(
        "--config none.toml",
        "",
        1,
        "vnvme: none.toml: No such file or directory (os error 2)",
    ),
    Mistake(
        "-s none/s mem://1M",
        "",
        1,
        "vnvme: none/s.lock: cannot make the lock file: No such file or directory (os error 2)",
    ),
    Mistake(
        "-s disk.raw mem://1M",
        "",
        1,
        "vnvme: disk.raw: exists and is not a socket",
    ),
    Mistake(
        "",
        "",
        2,
        "vnvme: nothing is named that could be served. Name",
    ),
    // Volumes.
    Mistake(
        "-s s mem://1M?iops=fast",
        "",
        1,
        "vnvme: mem://1M?iops=fast: option iops=fast: a number of requests per second is expected, \
         such as 5000, or 0 for no limit",
    ),
    Mistake(
        "-s s mem://1M?bps=fast",
        "",
        1,
        "vnvme: mem://1M?bps=fast: option bps=fast: a size begins with a whole number, such as \
         512M, 1G or 64KiB",
    ),
    Mistake(
        "-s s disk.raw?offset=2M",
        "",
        1,
        "vnvme: disk.raw?offset=2M: byte 2097152 does not lie within the volume's 1048576 bytes",
    ),
    Mistake(
        "-s s disk.raw?offset=512K&length=1M",
        "",
        1,
        "vnvme: disk.raw?offset=512K&length=1M: a slice of 1048576 bytes from byte 524288 does not \
         lie within the volume's 1048576 bytes",
    ),
    Mistake(
        "-s s disk.raw?nsdi=1",
        "",
        1,
        "vnvme: disk.raw?nsdi=1: option \"nsdi\" is unknown, did you mean \"nsid\"?",
    ),
    Mistake(
        "-s s mem://1M?block_size=512",
        "",
        1,
        "vnvme: mem://1M?block_size=512: option \"block_size\" is unknown, did you mean \
         \"block-size\"?",
    ),
    Mistake(
        "-s s disk.raw?locks=off",
        "",
        1,
        "vnvme: disk.raw?locks=off: option \"locks\" is unknown, did you mean \"lock\"?; file \
         volumes \
         have read-only, direct, lock, block-size, format, atomic, atomic-journal, timeout, \
         offset, length, partition, partlabel, partuuid, iops, read-iops, write-iops, bps, \
         read-bps, write-bps, burst, weight, share-depth",
    ),
    Mistake(
        "-s s disk.raw?weight=0",
        "",
        1,
        "vnvme: disk.raw?weight=0: option weight=0: a number from 1 on is expected (weights go up \
         to \
         10000, depths to 4096)",
    ),
    Mistake(
        "-s s mem://1M?burst=50",
        "",
        1,
        "vnvme: mem://1M?burst=50: option burst=50: the unit is missing: ns, us, ms or s",
    ),
    Mistake(
        "-s s mem://1M?iops=5&iops=6",
        "",
        1,
        "vnvme: mem://1M?iops=5&iops=6: option \"iops\" is given twice",
    ),
    Mistake(
        "-s s mem://1M?read-only=perhaps",
        "",
        1,
        "vnvme: mem://1M?read-only=perhaps: option read-only=perhaps: it is on or off",
    ),
    Mistake(
        "-s s mem://1M?block-size=1K",
        "",
        1,
        "vnvme: mem://1M?block-size=1K: block-size=1K: a whole number is expected without a unit, \
         1024",
    ),
    // Files of configuration, behind their parser.
    Mistake(
        "-c c.toml",
        "serial = \"S\"\n[[controller.namespace]]\nvolume = \"mem://1M\"\n",
        1,
        "vnvme: c.toml, line 8, controller b.sock: the serial number S is given twice",
    ),
    Mistake(
        "-c c.toml",
        "[[controller.namespace]]\nvolume = \"disk.raw?offset=2M\"\n",
        1,
        "vnvme: c.toml, line 9, controller b.sock: disk.raw?offset=2M: byte 2097152 does not lie \
         within the volume's 1048576 bytes",
    ),
    Mistake(
        "-c c.toml",
        "[[controller.namespace]]\nvolume = \"mem://1M\"\n[[controller.namespace]]\n\
         volume = \"mem://1M?iops=fast\"\n",
        1,
        "vnvme: c.toml, line 11, controller b.sock, namespace 2: mem://1M?iops=fast: option \
         iops=fast: a number of requests per second is expected, such as 5000, or 0 for no limit",
    ),
    Mistake(
        "-c c.toml",
        "io-queues = 99\n[[controller.namespace]]\nvolume = \"mem://1M\"\n",
        1,
        "vnvme: c.toml, line 8, controller b.sock: io-queues is 99: 1 to 64 are allowed",
    ),
    Mistake(
        "-c c.toml",
        "[[controller.namespace]]\nvolume = \"mem://1M\"\nblock-size = 1000\n",
        1,
        "vnvme: c.toml, line 10, controller b.sock: mem://1M: a block size of 1000 bytes is not \
         possible for a namespace: it is 512 or 4096",
    ),
    Mistake(
        "-c c.toml",
        "[[controller.namespace]]\nvolume = \"mem://1M\"\nnguid = \"12\"\n",
        1,
        "vnvme: c.toml, line 10, controller b.sock: nguid \"12\": 32 hexadecimal digits are needed",
    ),
    Mistake(
        "-c c.toml",
        "namespace = []\n",
        1,
        "vnvme: c.toml, line 6, controller b.sock: no volume to serve",
    ),
    Mistake(
        "-c c.toml",
        "socket-group = \"no-such-group\"\n[[controller.namespace]]\nvolume = \"mem://1M\"\n",
        1,
        "vnvme: c.toml, line 7, controller b.sock: there is no group \"no-such-group\" on this \
         machine",
    ),
    Mistake(
        "-c c.toml",
        "[[controller.namespace]]\nvolume = \"mem://1M\"\n[[vhost-user-blk]]\nsocket = \"a.sock\"\n\
         volume = \"mem://1M\"\n",
        1,
        "vnvme: c.toml, line 11, vhost-user-blk a.sock: the socket a.sock is given twice",
    ),
    Mistake(
        "-c c.toml",
        "[[controller.namespace]]\nvolume = \"none.raw\"\n",
        1,
        "vnvme: c.toml, line 9, controller b.sock: none.raw: no such file; create a raw \
         disk with: truncate -s 1G none.raw",
    ),
    // Disks that share a namespace.
    Mistake(
        "-c c.toml",
        "subsystem = \"s\"\n[[controller.namespace]]\nvolume = \"mem://1M\"\n",
        1,
        "vnvme: c.toml, line 8, controller b.sock: a disk with subsystem needs cntlid, a number of \
         its own in the subsystem",
    ),
    Mistake(
        "-c c.toml",
        "[[controller.namespace]]\nvolume = \"mem://1M\"\nreservations = \"r\"\n",
        1,
        "vnvme: c.toml, line 10, controller b.sock: reservations are of disks with subsystem",
    ),
    Mistake(
        "-c c.toml",
        "subsystem = \"s\"\ncntlid = 1\nnamespace = [{ volume = \"mem://1M\" }]\n\
         [[controller]]\nsocket = \"c.sock\"\nsubsystem = \"s\"\ncntlid = 2\n\
         [[controller.namespace]]\nvolume = \"mem://2M\"\n",
        1,
        "vnvme: c.toml, line 16, controller c.sock: another disk of the subsystem s describes \
         namespace 1 otherwise: they share it, so say the same of it",
    ),
    Mistake(
        "-c c.toml",
        "subsystem = \"s\"\ncntlid = 1\n[[controller.namespace]]\nvolume = \"mem://1M\"\n\
         reservations = \"c.toml\"\n",
        1,
        "vnvme: c.toml, line 11, controller b.sock: reservations of namespace 1: c.toml: this is no \
         file of reservations: it has 220 bytes, and they have 32768",
    ),
    // In the parser.
    Mistake(
        "-c c.toml",
        "io_queues = 3\n[[controller.namespace]]\nvolume = \"mem://1M\"\n",
        1,
        "unknown field `io_queues`, did you mean `io-queues`? expected one of `name`, `socket`, \
         `socket-owner`, `socket-group`, `socket-mode`, `doorbells`, `shadow-doorbells`, \
         `write-cache`, `model`, `cloud`, `serial`, `firmware`, `subnqn`, `subsystem`, `cntlid`, \
         `host-id`, `io-queues`, `queue-entries`, `mdts`, `max-namespaces`, `pool`, \
         `pool-capacity`, `pool-block-size`, `namespace`",
    ),
    Mistake(
        "-c c.toml",
        "socket-mode = 432\n[[controller.namespace]]\nvolume = \"mem://1M\"\n",
        1,
        "432: a mode is text, such as \"0660\"",
    ),
    Mistake(
        "-c c.toml",
        "write-cache = 1\n[[controller.namespace]]\nvolume = \"mem://1M\"\n",
        1,
        "1: true or false is expected",
    ),
    Mistake(
        "-c c.toml",
        "[[controller.namespace]]\nvolume = \"mem://1M\"\n[process]\ncpus = [0, \"x\"]\n",
        1,
        "\"x\" is neither a CPU's number nor a range like 0-3",
    ),
    // Other commands.
    Mistake(
        "bench disk.raw --runtime 5x",
        "",
        2,
        "error: invalid value '5x' for '--runtime <TIME>': the unit is unknown; known are us, ms, \
         s, m, h and d",
    ),
    Mistake(
        "bench disk.raw --size 200%",
        "",
        2,
        "error: invalid value '200%' for '--size <SIZE>': a part is a whole number from 1% to 100%",
    ),
    Mistake(
        "bench disk.raw --rw trim --verify",
        "",
        1,
        "vnvme: --verify: what trim leaves has no pattern",
    ),
    Mistake(
        "ublk mem://1M --no-write-cache",
        "",
        2,
        "error: unexpected argument '--no-write-cache' found",
    ),
    Mistake(
        "list --control disk.raw",
        "",
        1,
        "vnvme: disk.raw: this is no socket (is vnvme running? --control PATH names its \
         control socket)",
    ),
    Mistake(
        "list --control none/ctl",
        "",
        1,
        "vnvme: none/ctl: there is no control socket (is vnvme running? --control PATH names \
         its control socket)",
    ),
    Mistake(
        "list --control",
        "",
        2,
        "error: a value is required for '--control <PATH>' but none was supplied",
    ),
    Mistake("list all", "", 2, "error: unexpected argument 'all' found"),
    Mistake(
        "daemon mem://1M",
        "",
        2,
        "error: unexpected argument 'mem://1M' found",
    ),
    Mistake(
        "daemon --config none.toml",
        "",
        1,
        "vnvme: none.toml: No such file or directory (os error 2)",
    ),
    Mistake(
        "check none.toml",
        "",
        1,
        "vnvme: none.toml: No such file or directory (os error 2)",
    ),
    Mistake(
        "apply none.toml",
        "",
        1,
        "vnvme: none.toml: No such file or directory (os error 2)",
    ),
    Mistake(
        "detach a first",
        "",
        2,
        "error: invalid value 'first' for '<NSID>': a whole number is expected; vnvme show NAME \
         has the namespaces' IDs",
    ),
    Mistake(
        "detach a 0",
        "",
        2,
        "error: invalid value '0' for '<NSID>': 0 is not in 1..=4294967295; vnvme show NAME has \
         the namespaces' IDs",
    ),
    Mistake(
        "limits a --weight heavy",
        "",
        2,
        "error: invalid value 'heavy' for '--weight <N>': a whole number is expected",
    ),
    Mistake(
        "bench disk.raw --iodepth 1k",
        "",
        2,
        "error: invalid value '1k' for '--iodepth <N>': a whole number is expected without a unit, \
         1024",
    ),
    Mistake(
        "-s s mem://1M --io-queues many",
        "",
        2,
        "error: invalid value 'many' for '--io-queues <N>': a whole number is expected",
    ),
    Mistake(
        "-s s mem://1M --io-queues -1",
        "",
        2,
        "error: unexpected argument '-1' found",
    ),
    Mistake(
        "resize a 5X",
        "",
        2,
        "error: invalid value '5X' for '<SIZE>': the unit is unknown; known are K, M, G, T, P \
         (powers of 1024), KiB, ..., and KB, ... (1000)",
    ),
    Mistake(
        "add disk mem://1M",
        "",
        2,
        "error: invalid value 'disk' for '<KIND>'",
    ),
    Mistake(
        "add controller socket=q.sock",
        "",
        2,
        "vnvme: the disk has no volume",
    ),
    Mistake(
        "add controller socket=q.sock io_queues=9 mem://1M",
        "",
        2,
        "vnvme: io_queues=9 is no key with its value, did you mean io-queues=9? (A volume of that \
         name is written ./io_queues=9)",
    ),
    Mistake(
        "attach a mem://1M Nsid=2",
        "",
        2,
        "vnvme: Nsid=2 is no key with its value, did you mean nsid=2? (A volume of that name is \
         written ./Nsid=2)",
    ),
    Mistake(
        "serv -s s mem://1M",
        "",
        2,
        "error: unrecognized subcommand 'serv'",
    ),
    Mistake(
        "stats --jsn",
        "",
        2,
        "error: unexpected argument '--jsn' found",
    ),
    Mistake(
        "top --interval 0",
        "",
        2,
        "error: invalid value '0' for '--interval <DURATION>': the unit is missing: ns, us, ms \
         or s",
    ),
    Mistake(
        "-s s mem://1M --metrics 9469",
        "",
        2,
        "error: invalid value '9469' for '--metrics <ADDRESS:PORT>': an IP address and a port \
         are expected, like 127.0.0.1:9469 or [::1]:9469",
    ),
    Mistake(
        "-s s mem://1M --log-format xml",
        "",
        2,
        "error: invalid value 'xml' for '--log-format <FORMAT>'",
    ),
];

/// What the first word may be, besides nothing.
const COMMANDS: &[&str] = &[
    "add", "apply", "attach", "bench", "check", "daemon", "detach", "limits", "list", "resize",
    "serv", "stats", "top", "ublk",
];

#[test]
fn each_mistake_has_its_message_and_exit_status() {
    let place = Place::new();
    let dir = place.path("");
    fs::File::create(place.path("disk.raw"))
        .and_then(|file| file.set_len(1 << 20))
        .unwrap();
    let mut wrong = Vec::new();
    for Mistake(args, file, status, message) in MISTAKES {
        fs::write(place.path("c.toml"), format!("{TWO}{file}")).unwrap();
        let mut words: Vec<&str> = args.split_whitespace().collect();
        if !words.first().is_some_and(|word| COMMANDS.contains(word)) {
            words.insert(0, "serve");
        }
        let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(&words)
            .current_dir(&dir)
            .env_remove("VNVME_LOG")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        // Usage follows what is wrong with a command line; the log may come before the rest.
        let line = match status {
            2 => text.lines().next(),
            _ => text.lines().rfind(|line| !line.is_empty()),
        };
        let found = (output.status.code(), line.unwrap_or_default());
        if found != (Some(*status), *message) {
            wrong.push(format!(
                "{args} {file:?}\n  wanted {status} {message}\n  found  {found:?}"
            ));
        }
        assert!(!place.path("a.sock").exists(), "{args}: its socket is left");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(MISTAKES.len() > 65);
}

/// What follows what is wrong with a command line: the way that it is right.
#[test]
fn a_key_that_is_given_as_an_option_is_told_how_it_is_written() {
    for (args, tip) in [
        (
            "add controller --socket /run/a mem://1M",
            "as a word: socket=VALUE",
        ),
        (
            "add controller --io-queue=9 mem://1M",
            "as a word: io-queues=VALUE",
        ),
        ("add ublk mem://1M --queues 2", "as a word: queues=VALUE"),
        ("attach a mem://1M --nsid 2", "as a word: nsid=VALUE"),
        // Options that there are have clap's own tip.
        (
            "attach a mem://1M --contrl x",
            "a similar argument exists: '--control'",
        ),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(args.split_whitespace())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args}: {told}");
        assert!(told.contains(tip), "{args}: {told}");
        let to_pass = told.contains("as a value, use '--");
        assert!(!to_pass, "no volume is meant: {told}");
    }
}

/// What a daemon is asked that it cannot do, and what is said; the exit status is 1. DIR is the
/// folder that it may open files in.
const REFUSED: &[(&str, &str)] = &[
    ("show x", "vnvme: no disk is called \"x\""),
    ("show A", "vnvme: no disk is called \"A\""),
    ("remove x", "vnvme: no disk is called \"x\""),
    ("limits x --iops 5", "vnvme: no disk is called \"x\""),
    ("path x --set direct", "vnvme: no disk is called \"x\""),
    (
        "suspend x",
        "vnvme: no device is driven by this process: only volumes of nvme:// and vfio-user:// \
         stand on one",
    ),
    ("attach x mem://1M", "vnvme: no disk is called \"x\""),
    (
        "attach b mem://1M",
        "vnvme: \"b\" is no controller: only controllers have namespaces that come and go",
    ),
    (
        "attach a mem://lots",
        "vnvme: size \"lots\" in mem://lots: a size begins with a whole number, such as 512M, \
         1G or 64KiB",
    ),
    (
        "attach a DIR/none.raw",
        "vnvme: DIR/none.raw: no such file; create a raw disk with: truncate -s 1G DIR/none.raw",
    ),
    (
        "attach a none.raw",
        "vnvme: none.raw: the sandbox keeps this process from opening it: it is not below a folder \
         that the option allow of [process] names, which allows DIR",
    ),
    (
        "attach a mem://1M nsid=1",
        "vnvme: \"a\" has a namespace 1 already",
    ),
    (
        "attach a mem://1M nsid=99",
        "vnvme: namespace 99: this controller has room for namespaces 1 to 16; max-namespaces \
         gives it more when it starts",
    ),
    (
        "attach a mem://1M nsd=2",
        "vnvme: unknown field `nsd`, did you mean `nsid`? expected one of `volume`, \
         `read-only`, `block-size`, `on-read-error`, `on-write-error`, `nsid`, `nguid`, `eui64`, \
         `path`, `reservations`, `zone-size`, `zone-capacity`, `max-open-zones`, \
         `max-active-zones`, `zone-table`, `fdp-handles`, `fdp-unit`, `fdp-table`, \
         `metadata`, `metadata-size`, `metadata-extended`, `protection`, `guard`, \
         `protection-first`, \
         `ana-group`, `ana-state`",
    ),
    ("detach a 7", "vnvme: \"a\" has no namespace 7"),
    (
        "detach b 1",
        "vnvme: \"b\" is no controller: only controllers have namespaces that come and go",
    ),
    (
        "resize a 2M",
        "vnvme: namespace 1: its size cannot be changed: only whole files can be resized",
    ),
    ("resize a 2M --nsid 5", "vnvme: \"a\" has no namespace 5"),
    (
        "resize f 1000",
        "vnvme: namespace 1: DIR/disk.raw: size of 1000 bytes is not a multiple of 512 bytes; \
         extend it with: truncate -s %512 DIR/disk.raw",
    ),
    ("add controller mem://1M", "vnvme: missing field `socket`"),
    (
        "add controller socket=DIR/a.sock mem://1M",
        "vnvme: a disk \"a\" is there already",
    ),
    (
        "add controller socket=DIR/none/q.sock mem://1M",
        "vnvme: DIR/none/q.sock.lock: cannot make the lock file: No such file or directory (os \
         error 2)",
    ),
    (
        "add controller socket=/none/q.sock mem://1M",
        "vnvme: /none/q.sock: the sandbox keeps this process from opening it: it is not below \
         a folder that the option allow of [process] names, which allows DIR",
    ),
    (
        "add controller socket=DIR/disk.raw mem://1M",
        "vnvme: DIR/disk.raw: exists and is not a socket",
    ),
    (
        "add controller socket=DIR/q.sock io-queues=99 mem://1M",
        "vnvme: io-queues is 99: 1 to 64 are allowed",
    ),
    (
        "add ublk mem://1M",
        "vnvme: ublk: block devices of the host can only be added where the sandbox was told \
         so: write allow = [\"ublk\", ...] into [process], and start the daemon again",
    ),
    (
        "apply none.toml",
        "vnvme: none.toml: No such file or directory (os error 2)",
    ),
    (
        "apply more.toml",
        "vnvme: DIR/none.raw: no such file; create a raw disk with: truncate -s 1G \
         DIR/none.raw; nothing was changed",
    ),
    (
        "save DIR/none/save.toml",
        "vnvme: DIR/none/save.toml: No such file or directory (os error 2)",
    ),
    (
        "list --control DIR/a.sock",
        "vnvme: this is the socket of a disk, not a control socket",
    ),
    (
        "list --control DIR/b.sock",
        "vnvme: this is the socket of a disk, not a control socket",
    ),
];

/// A controller, one of a file, an export.
const SERVED: &str = "\
[[controller]]
name = \"a\"
socket = \"DIR/a.sock\"
namespace = [{ volume = \"mem://1M\" }]
[[controller]]
name = \"f\"
socket = \"DIR/f.sock\"
namespace = [{ volume = \"DIR/disk.raw\" }]
[[vhost-user-blk]]
name = \"b\"
socket = \"DIR/b.sock\"
volume = \"mem://1M\"
";

#[test]
fn what_a_daemon_refuses_has_its_message_and_changes_nothing() {
    let place = Place::new();
    let dir = text(&place.path("x"));
    let dir = dir.strip_suffix("/x").unwrap();
    fs::File::create(place.path("disk.raw"))
        .and_then(|file| file.set_len(1 << 20))
        .unwrap();
    let served = SERVED.replace("DIR", dir);
    fs::write(place.path("served.toml"), &served).unwrap();
    let more = format!(
        "{served}[[controller]]\nsocket = \"{dir}/new.sock\"\nnamespace = [{{ volume = \"mem://1M\" }}]\n\
         [[controller]]\nsocket = \"{dir}/q.sock\"\nnamespace = [{{ volume = \"{dir}/none.raw\" }}]\n"
    );
    fs::write(place.path("more.toml"), more).unwrap();
    let control = text(&place.path("ctl"));
    let config = text(&place.path("served.toml"));
    let args = [
        "daemon",
        "--config",
        &config,
        "--control",
        &control,
        "--allow",
        dir,
    ];
    let daemon = Daemon::spawn(&args);
    for socket in ["a.sock", "f.sock", "b.sock"] {
        daemon.wait_listening(&place.path(socket));
    }
    let run = |line: &str| {
        let words = line.replace("DIR", dir);
        let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(words.split_whitespace())
            .current_dir(dir)
            .env("VNVME_CONTROL", &control)
            .env_remove("VNVME_LOG")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        let last = told.lines().rfind(|line| !line.is_empty());
        let last = last.unwrap_or_default().replace(dir, "DIR");
        (output.status.code(), last, output.stdout)
    };
    let (status, _, before) = run("list --json");
    assert_eq!(status, Some(0));
    let mut wrong = Vec::new();
    for (line, message) in REFUSED {
        let (status, found, _) = run(line);
        if status != Some(1) || found != *message {
            wrong.push(format!(
                "{line}\n  wanted {message}\n  found  {status:?} {found}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // A reload of what is wrong.
    fs::write(place.path("served.toml"), "[[controler]]\n").unwrap();
    let (status, found, _) = run("reload");
    assert_eq!(status, Some(1));
    assert!(found.contains("did you mean `controller`"), "{found}");
    let (_, _, after) = run("list --json");
    assert_eq!(String::from_utf8(after), String::from_utf8(before));
    for socket in ["new.sock", "q.sock"] {
        assert!(!place.path(socket).exists(), "{socket} is left");
    }
    daemon.end();
}

/// A path that is longer than a socket's address has room for.
#[test]
fn a_path_that_is_too_long_for_a_socket_is_explained() {
    let place = Place::new();
    let long = format!("{}/{}.sock", text(&place.path("")), "a".repeat(200));
    let socket = text(&place.socket());
    for args in [
        &["serve", "-s", &long, "mem://1M"][..],
        &["serve", "-s", &socket, "--control", &long, "mem://1M"],
        &["list", "--control", &long],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_vnvme"))
            .args(args)
            .env("VNVME_CONTROL", "none")
            .output()
            .unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(
            told.contains("the path of a socket has at most 107 bytes"),
            "{told}"
        );
        assert!(!place.socket().exists());
    }
}

/// The client's whole answer.
fn answer(place: &Place, socket: &str, request: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(place.path(socket)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(request).unwrap();
    let mut all = Vec::new();
    let mut piece = [0; 4096];
    // What it did not read makes the end of the connection an error.
    while let Ok(len @ 1..) = stream.read(&mut piece) {
        all.extend_from_slice(&piece[..len]);
    }
    all
}

#[test]
fn clients_at_the_wrong_socket_are_named_and_told() {
    let place = Place::new();
    let export = text(&place.path("blk.sock"));
    let daemon = Daemon::serve(
        &place,
        &["--vhost-user-blk", &export, "mem://1M", "mem://1M"],
    );
    daemon.wait_listening(&place.path("blk.sock"));
    let get = b"GET /v1/stats HTTP/1.1\r\nHost: x\r\n\r\n";
    for socket in ["vm.sock", "blk.sock"] {
        for request in [&get[..], b"{\"method\":\"stats\"}\n"] {
            let told = String::from_utf8(answer(&place, socket, request)).unwrap();
            assert!(
                told.starts_with("HTTP/1.1 421 Misdirected Request\r\n"),
                "{told}"
            );
            assert!(told.ends_with("not a control socket\"}\n"), "{told}");
        }
    }
    daemon.wait_log(|line| line.contains("vm.sock") && line.contains("for a control socket"));
    daemon.wait_log(|line| line.contains("blk.sock") && line.contains("for a control socket"));

    // vhost-user has no errors that a client would read; it only sees the end.
    let words = |words: [u32; 3]| words.map(u32::to_ne_bytes).concat();
    assert!(answer(&place, "vm.sock", &words([1, 1, 0])).is_empty());
    daemon.wait_log(|line| line.contains("vm.sock") && line.contains("it speaks vhost-user"));

    let refused = Client::connect(place.path("blk.sock"), LIMIT);
    let Err(ClientError::Refused { errno, .. }) = refused else {
        panic!("{:?}", refused.err());
    };
    assert_eq!(errno, Some(vfio_user::Errno::PROTONOSUPPORT));
    daemon.wait_log(|line| line.contains("blk.sock") && line.contains("it speaks vfio-user"));

    let mut host = Host::up(&place.socket());
    assert!(
        host.read(1, 0, 4096) == vec![0; 4096],
        "the right one is served"
    );
    drop(host);
    daemon.end();
}

#[test]
fn the_end_names_clients_that_are_attached() {
    let place = Place::new();
    let daemon = Daemon::serve(&place, &["mem://1M"]);
    let host = Host::up(&place.socket());
    let ended = daemon.end();
    let line = ended
        .log
        .iter()
        .find(|line| line.contains("a client is attached"));
    let line = line.expect("it is said");
    let pid = format!("pid={}", std::process::id());
    assert!(
        line.contains("WARN") && line.contains("vm.sock") && line.contains(&pid),
        "{line}"
    );
    drop(host);
    // Nothing is said of a disk without one.
    let daemon = Daemon::serve(&place, &["mem://1M"]);
    drop(Host::up(&place.socket()));
    daemon.wait_log(|line| line.contains("client disconnected"));
    let ended = daemon.end();
    assert!(!ended.log.iter().any(|line| line.contains("is attached")));
}

#[test]
fn workers_that_share_cpus_are_warned_about() {
    let place = Place::new();
    let daemon = Daemon::serve(&place, &["--workers", "3", "--cpus", "0-0", "mem://1M"]);
    daemon.wait_log(|line| line.contains("WARN") && line.contains("3 workers have 1 CPUs"));
    daemon.end();
    let daemon = Daemon::serve(&place, &["--workers", "1", "--cpus", "0-0", "mem://1M"]);
    assert_eq!(daemon.count("workers have"), 0);
    daemon.end();
}

/// FUSE_OPEN (linux/fuse.h).
const OPEN: u32 = 14;

/// Nobody can connect to a disk that will not be served, as another one's volume is missing.
#[test]
fn sockets_are_made_when_all_volumes_are_open() {
    let place = Place::new();
    let Ok(fuse) = Fuse::mount(&place.path("mnt"), 1 << 20)
        .map_err(|why| testkit::skip("vnvme::errors::sockets_are_made", why))
    else {
        return;
    };
    let one = |socket: &str, volume: &str| {
        let socket = text(&place.path(socket));
        format!(
            "[[controller]]\nsocket = \"{socket}\"\nnamespace = [{{ volume = \"{volume}\" }}]\n"
        )
    };
    let file = one("a.sock", "mem://1M") + &one("b.sock", &text(&fuse.file()));
    fs::write(place.path("c.toml"), file).unwrap();
    fuse.fall_silent_at(OPEN);
    let daemon = Daemon::spawn(&["serve", "--config", &text(&place.path("c.toml"))]);
    daemon.wait_log(|line| line.contains("mem://1M"));
    fuse.wait_held(1);
    assert!(!place.path("a.sock").exists());
    fuse.answer();
    daemon.wait_listening(&place.path("a.sock"));
    daemon.wait_listening(&place.path("b.sock"));
    daemon.end();
}
