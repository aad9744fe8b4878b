//! The options, by what they are options of.
//!
//! A new option is a row here and a field of the structure that it sets.

mod namespace;
mod process;

use super::{Flag, Row, Setting, Spec, Url};
use crate::spec::{ControllerSpec, NvmeTcpSpec, Specs, UblkSpec, VhostBlkSpec};
use serde::de::MapAccess;

/// Where a VMM connects.
const fn socket<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "Unix socket to listen on; created with mode 0600, a stale one is replaced";
    Row::new("socket", "PATH", help, setting).required()
}

/// Who may connect. The file says it of each socket, and in `[process]` of those that say nothing.
const fn socket_owner<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "user that the socket belongs to, a name or a number";
    let flag = Flag::default("socket-owner");
    Row::new("socket-owner", "USER", help, setting)
        .or("the process's own")
        .serve(flag.help("user that the sockets belong to, a name or a number"))
}

const fn socket_group<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "group of the socket, a name or a number; it may connect, too, unless socket-mode \
                says otherwise";
    Row::new("socket-group", "GROUP", help, setting)
        .or("the process's own")
        .serve(Flag::default("socket-group"))
}

const fn socket_mode<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "who may connect: the mode of the socket in octal digits, such as 0660";
    Row::new("socket-mode", "MODE", help, setting)
        .or("0600, with a group 0660")
        .serve(Flag::default("socket-mode"))
}

const fn name<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "what the disk is called by \"vnvme list\" and all that concerns one disk; unique \
                in the process";
    Row::new("name", "TEXT", help, setting)
}

const fn volume<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "path or URL, or a table of the URL and its options, \
                { url = \"a.raw\", iops = 1000 }";
    Row::new("volume", "URL", help, setting).required()
}

const fn read_only<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let flag = Flag::overrides("read-only").short('r');
    Row::new("read-only", "on|off", "refuse writes", setting)
        .or("off")
        .serve(flag.help("refuse writes, to every volume"))
        .ublk(flag)
}

const fn block_size<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let flag = Flag::default("block-size").short('b');
    Row::new(
        "block-size",
        "512|4096",
        "logical block size in bytes",
        setting,
    )
    .or("the volume's, 512 at least")
    .in_url()
    .serve(flag.help("logical block size in bytes, of every volume"))
    .ublk(flag)
}

const fn on_read_error<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "what becomes of reads that fail: told to the guest; repeated for 20 s; or held, \
                as all that come later, until \"vnvme resume\"";
    let flag = Flag::default("on-read-error");
    Row::new("on-read-error", "report|retry|stop", help, setting)
        .or("report")
        .in_url()
        .serve(flag)
        .ublk(flag)
}

const fn on_write_error<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "the same of writes, zeroing and deallocation; enospc-stop holds what fails for \
                want of space, and tells the guest of the rest. What was written and cannot be \
                made durable is always told";
    let flag = Flag::default("on-write-error");
    let form = "report|retry|stop|enospc-stop";
    Row::new("on-write-error", form, help, setting)
        .or("report")
        .in_url()
        .serve(flag)
        .ublk(flag)
}

const fn write_cache<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "volatile write cache; off: every write is durable when it completes";
    let flag = Flag::overrides("no-write-cache");
    Row::new("write-cache", "on|off", help, setting)
        .or("on")
        .serve(flag.help(
            "start with the volatile write cache off: every write is durable when it completes",
        ))
}

const fn model<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "model number, up to 40 characters";
    Row::new("model", "TEXT", help, setting)
        .or("vnvme virtual NVMe disk")
        .serve(Flag::default("model"))
}

const fn serial<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "serial number, up to 20 characters";
    Row::new("serial", "TEXT", help, setting)
        .or("made from the volumes, stable")
        .serve(Flag::refused("serial", "names one controller"))
}

const fn firmware<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "firmware revision, up to 8 characters";
    Row::new("firmware", "TEXT", help, setting)
        .or("the version of vnvme")
        .serve(Flag::default("firmware"))
}

const fn subnqn<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    Row::new("subnqn", "NQN", "NVM subsystem NQN", setting)
        .or("made from the serial number")
        .serve(Flag::refused("subnqn", "names one controller"))
}

const fn mdts<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "largest transfer of a command: 4 KiB times two to the power of this";
    Row::new("mdts", "N", help, setting)
        .or("8")
        .serve(Flag::default("mdts"))
}

impl Spec for ControllerSpec {
    const TABLE: &'static str = "[[controller]]";
    const NAMES: &'static str = "NVMe controllers";
    const ROWS: &'static [Row<Self>] = &[
        name::<Self>(|c| &mut c.name).or("the name of the socket's file, without .sock"),
        socket(|c| &mut c.socket),
        socket_owner(|c| &mut c.access.owner),
        socket_group(|c| &mut c.access.group),
        socket_mode(|c| &mut c.access.mode),
        Row::<Self>::new(
            "doorbells",
            "MODE",
            "how the client rings doorbells: by message, or in a mapped page that is polled all \
             the time",
            |c| &mut c.doorbells,
        )
        .or("trapped")
        .serve(Flag::default("doorbells")),
        Row::<Self>::new(
            "shadow-doorbells",
            "on|off",
            "offer shadow doorbells (Doorbell Buffer Config)",
            |c| &mut c.shadow_doorbells,
        )
        .or("on")
        .serve(
            Flag::overrides("no-shadow-doorbells")
                .help("do not offer shadow doorbells (Doorbell Buffer Config)"),
        ),
        Row::<Self>::new(
            "cmb-size",
            "SIZE",
            "controller memory buffer (CMB) of so many bytes, a power of two from 4K to 64M, in \
             which the guest may have queues, lists and data; Linux needs 2M at least",
            |c| &mut c.cmb_size,
        )
        .or("none")
        .serve(Flag::default("cmb-size")),
        Row::<Self>::new(
            "boot-partition",
            "PATH",
            "file that both Boot Partitions hold, which firmware reads before it has any queue; up \
             to 64M, read when the disk is opened",
            |c| &mut c.boot_partition,
        )
        .or("none")
        .serve(Flag::default("boot-partition")),
        write_cache(|c| &mut c.write_cache),
        model(|c| &mut c.model),
        Row::<Self>::new(
            "cloud",
            "CLOUD",
            "look like a disk of a cloud, whose images find device names in vendor specific \
             bytes: amazon:DEVICE, google:NAME or azure; with its model number, if no other one \
             is set, and its PCI IDs",
            |c| &mut c.cloud,
        )
        .or("none")
        .serve(Flag::refused("cloud", "names one controller")),
        serial(|c| &mut c.serial),
        firmware(|c| &mut c.firmware),
        subnqn(|c| &mut c.subnqn),
        Row::<Self>::new(
            "subsystem",
            "TEXT",
            "name of the NVM subsystem that the disk is in: disks of one subsystem share the \
             namespaces of the same ID, with reservations; each of them lives on one worker",
            |c| &mut c.subsystem,
        )
        .or("one of its own"),
        Row::<Self>::new(
            "cntlid",
            "N",
            "controller ID, unique in its subsystem: required of disks with subsystem",
            |c| &mut c.cntlid,
        )
        .range(0, 65_519)
        .or("1"),
        Row::<Self>::new(
            "host-id",
            "HEX",
            "of a disk in a subsystem: Host Identifier of the guest that it is for, 32 hexadecimal \
             digits, to whom its reservations belong; the same for all disks of one guest, which \
             cannot change it",
            |c| &mut c.host_id,
        )
        .or("made from the disk's name"),
        Row::<Self>::new("io-queues", "N", "I/O queue pairs, 1 to 128", |c| {
            &mut c.io_queues
        })
        .or("64")
        .serve(Flag::default("io-queues")),
        Row::<Self>::new(
            "queue-entries",
            "N",
            "entries per queue, a power of two from 2 to 4096",
            |c| &mut c.queue_entries,
        )
        .or("4096")
        .serve(Flag::default("queue-entries")),
        mdts(|c| &mut c.mdts),
        Row::<Self>::new(
            "max-namespaces",
            "N",
            "largest NSID that a namespace may ever have (NN): room for those that are attached \
             while it runs",
            |c| &mut c.max_namespaces,
        )
        .range(1, 1024)
        .or("the largest that is configured; 16 at least under vnvme daemon, and with pool"),
        Row::<Self>::new(
            "pool",
            "PATH",
            "folder in which the guest makes namespaces of its own, each a file (nvme create-ns, \
             attach-ns, detach-ns, delete-ns); it has to be there, and no other disk has it",
            |c| &mut c.pool,
        )
        .or("none"),
        Row::<Self>::new(
            "pool-capacity",
            "SIZE",
            "what these namespaces may have together (UNVMCAP is what is left); the files are \
             sparse",
            |c| &mut c.pool_capacity,
        )
        .or("required with pool"),
        Row::<Self>::new(
            "pool-block-size",
            "512|4096",
            "logical block size in bytes of namespaces that the guest makes from now on",
            |c| &mut c.pool_block_size,
        )
        .or("512"),
    ];
    const NESTED: &'static [(&'static str, bool)] = &[("namespace", true)];
    const OF_PROCESS: &'static [&'static str] = &["spread"];

    fn nested<'de, A: MapAccess<'de>>(&mut self, _: &str, map: &mut A) -> Result<(), A::Error> {
        self.namespaces = map.next_value()?;
        Ok(())
    }
}

impl Spec for VhostBlkSpec {
    const TABLE: &'static str = "[[vhost-user-blk]]";
    const NAMES: &'static str = "vhost-user-blk exports";
    const ROWS: &'static [Row<Self>] = &[
        name::<Self>(|e| &mut e.name).or("the name of the socket's file, without .sock"),
        socket(|e| &mut e.socket),
        socket_owner(|e| &mut e.access.owner),
        socket_group(|e| &mut e.access.group),
        socket_mode(|e| &mut e.access.mode),
        volume(|e| &mut e.volume),
        Row::<Self>::new("queues", "N", "request queues at most", |e| &mut e.queues)
            .or("128")
            .in_url(),
        Row::<Self>::new(
            "queue-size",
            "N",
            "entries of a queue that requests are made for (seg_max is two less)",
            |e| &mut e.queue_size,
        )
        .or("128")
        .in_url(),
        Row::<Self>::new(
            "serial",
            "TEXT",
            "serial number, up to 20 characters",
            |e| &mut e.serial,
        )
        .or("made from the volume, stable")
        .in_url(),
        block_size(|e| &mut e.block_size),
        on_read_error(|e| &mut e.on_read_error),
        on_write_error(|e| &mut e.on_write_error),
        read_only(|e| &mut e.read_only),
        write_cache::<Self>(|e| &mut e.write_cache).in_url(),
    ];

    fn volume(&mut self) -> Option<&mut Url> {
        Some(&mut self.volume)
    }
}

impl Spec for NvmeTcpSpec {
    const TABLE: &'static str = "[[nvme-tcp]]";
    const NAMES: &'static str = "NVMe/TCP subsystems";
    const ROWS: &'static [Row<Self>] = &[
        name::<Self>(|t| &mut t.name).or("tcp- and the address"),
        Row::<Self>::new(
            "listen",
            "ADDRESS:PORT",
            "where hosts connect; 4420 is the usual port",
            |t| &mut t.listen,
        )
        .required(),
        Row::<Self>::new("hosts", "NQNS", "hosts that may connect", |t| &mut t.hosts)
            .or("all that reach the address"),
        Row::<Self>::new(
            "host-keys",
            "PATH",
            "file of the hosts that may connect, with the secrets by which they have to prove who \
             they are (DH-HMAC-CHAP): an NQN, its DHHC-1 secret, and the subsystem's if it is \
             asked for that, in a line each. Without, only an address of this host itself can be \
             listened at",
            |t| &mut t.host_keys,
        )
        .serve(Flag::default("host-keys")),
        write_cache(|t| &mut t.write_cache),
        model(|t| &mut t.model),
        serial(|t| &mut t.serial),
        firmware(|t| &mut t.firmware),
        subnqn(|t| &mut t.subnqn),
        Row::<Self>::new("io-queues", "N", "I/O queues of each host", |t| {
            &mut t.io_queues
        })
        .range(1, 64)
        .or("16"),
        Row::<Self>::new(
            "queue-entries",
            "N",
            "entries of each of these queues",
            |t| &mut t.queue_entries,
        )
        .range(2, 256)
        .or("128"),
        mdts(|t| &mut t.mdts),
        Row::<Self>::new(
            "max-hosts",
            "N",
            "hosts that may be connected at a time",
            |t| &mut t.max_hosts,
        )
        .range(1, 1024)
        .or("64"),
    ];
    const NESTED: &'static [(&'static str, bool)] = &[("namespace", true)];

    fn nested<'de, A: MapAccess<'de>>(&mut self, _: &str, map: &mut A) -> Result<(), A::Error> {
        self.namespaces = map.next_value()?;
        Ok(())
    }
}

impl Spec for UblkSpec {
    const TABLE: &'static str = "[[ublk]]";
    const NAMES: &'static str = "block devices";
    const ROWS: &'static [Row<Self>] = &[
        name::<Self>(|d| &mut d.name).or("the name of the device, ublkbN"),
        volume(|d| &mut d.volume),
        Row::<Self>::new("id", "N", "number of the device, N of /dev/ublkbN", |d| {
            &mut d.id
        })
        .or("any that is free")
        .ublk(
            Flag::default("id")
                .help("number of the first device, N of /dev/ublkbN; the others follow"),
        ),
        Row::<Self>::new("queues", "N", "queues of each device", |d| &mut d.queues)
            .or("1")
            .ublk(Flag::default("queues")),
        Row::<Self>::new("depth", "N", "requests of each queue", |d| &mut d.depth)
            .or("128")
            .ublk(Flag::default("depth")),
        block_size(|d| &mut d.block_size),
        on_read_error(|d| &mut d.on_read_error),
        on_write_error(|d| &mut d.on_write_error),
        read_only(|d| &mut d.read_only),
        Row::<Self>::new(
            "recover",
            "on|off",
            "let the device outlive a killed process: it waits for the next one with the same id, \
             and so do its users",
            |d| &mut d.recover,
        )
        .or("off")
        .ublk(Flag::overrides("recover").requires("id")),
    ];
    const REFUSED: &'static [(&'static str, &'static str)] = &[(
        "no-write-cache",
        "devices have a write cache that cannot be turned off",
    )];

    fn volume(&mut self) -> Option<&mut Url> {
        Some(&mut self.volume)
    }
}

impl Spec for Specs {
    const TABLE: &'static str = "(the file)";
    const NAMES: &'static str = "files";
    const ROWS: &'static [Row<Self>] = &[];
    const NESTED: &'static [(&'static str, bool)] = &[
        ("controller", false),
        ("vhost-user-blk", false),
        ("nvme-tcp", false),
        ("ublk", false),
        ("process", false),
    ];

    fn nested<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        match key {
            "controller" => self.controllers = map.next_value()?,
            "vhost-user-blk" => self.vhost_user_blk = map.next_value()?,
            "nvme-tcp" => self.nvme_tcp = map.next_value()?,
            "ublk" => self.ublk = map.next_value()?,
            _ => self.process = map.next_value()?,
        }
        Ok(())
    }
}
