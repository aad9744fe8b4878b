//! Option tables, one for each kind of configuration table.
//!
//! A new option is a row here and a field of the structure that it sets.

mod namespace;
mod process;

use super::file;
use super::{Flag, Row, Setting, Spec, Url};
use crate::spec::{ControllerSpec, NvmeTcpSpec, Specs, UblkSpec, VhostBlkSpec};
use serde::de::MapAccess;

/// Returns the option `socket`: the path of the socket that a VMM connects to.
const fn socket<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "Unix socket to listen on; created with mode 0600, replaces a stale one";
    Row::new("socket", "PATH", help, setting).required()
}

/// Access options of a socket. A configuration file sets them for each socket, and in `[process]`
/// the defaults.
const fn socket_owner<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "owner of the socket, a user name or number";
    let flag = Flag::default("socket-owner");
    Row::new("socket-owner", "USER", help, setting)
        .or("the user of the process")
        .serve(flag.help("owner of the sockets, a user name or number"))
}

const fn socket_group<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "group of the socket, a name or number; may connect unless socket-mode forbids it";
    Row::new("socket-group", "GROUP", help, setting)
        .or("the group of the process")
        .serve(Flag::default("socket-group"))
}

const fn socket_mode<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "access mode of the socket in octal digits, such as 0660";
    Row::new("socket-mode", "MODE", help, setting)
        .or("0600, with a group 0660")
        .serve(Flag::default("socket-mode"))
}

const fn name<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "name of the disk in \"vnvme list\" and in every command for one disk; unique in \
                the process";
    Row::new("name", "TEXT", help, setting)
}

const fn volume<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "path or URL, or a table of the URL and its options, { url = \"a.raw\", iops = 1000 \
                }";
    Row::new("volume", "URL", help, setting).required()
}

const fn read_only<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let flag = Flag::overrides("read-only").short('r');
    Row::new("read-only", "on|off", "refuse writes", setting)
        .or("off")
        .serve(flag.help("refuse writes to every volume"))
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
    .or("that of the volume, at least 512")
    .in_url()
    .serve(flag.help("logical block size of every volume, in bytes"))
    .ublk(flag)
}

const fn on_read_error<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "error policy for reads: report the error to the guest, retry for 20 s, or stop the \
                disk until \"vnvme resume\"";
    let flag = Flag::default("on-read-error");
    Row::new("on-read-error", "report|retry|stop", help, setting)
        .or("report")
        .in_url()
        .serve(flag)
        .ublk(flag)
}

const fn on_write_error<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "error policy for writes, zeroing and deallocation, as for reads; enospc-stop stops \
                the disk when space runs out and reports other errors. A failed flush is always \
                reported";
    let flag = Flag::default("on-write-error");
    let form = "report|retry|stop|enospc-stop";
    Row::new("on-write-error", form, help, setting)
        .or("report")
        .in_url()
        .serve(flag)
        .ublk(flag)
}

const fn write_cache<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "volatile write cache; off makes every write durable when it completes";
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
        .or("derived from the volumes, stable")
        .serve(Flag::refused("serial", "names one controller"))
}

const fn firmware<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "firmware revision, up to 8 characters";
    Row::new("firmware", "TEXT", help, setting)
        .or("version of vnvme")
        .serve(Flag::default("firmware"))
}

const fn subnqn<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    Row::new("subnqn", "NQN", "NVM subsystem NQN", setting)
        .or("derived from the serial number")
        .serve(Flag::refused("subnqn", "names one controller"))
}

const fn mdts<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "maximum data transfer size (MDTS): 4 KiB times two to the power of N";
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
            "doorbell writes of the client: trapped (by message) or mapped (a shared page, polled \
             all the time)",
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
            "size of the controller memory buffer (CMB) for the guest's queues, lists and data: a \
             power of two from 4K to 64M; Linux needs at least 2M",
            |c| &mut c.cmb_size,
        )
        .or("none")
        .serve(Flag::default("cmb-size")),
        Row::<Self>::new(
            "boot-partition",
            "PATH",
            "image of both Boot Partitions, which firmware reads before it creates queues; up to \
             64M, read when the disk is opened",
            |c| &mut c.boot_partition,
        )
        .or("none")
        .serve(Flag::default("boot-partition")),
        write_cache(|c| &mut c.write_cache),
        model(|c| &mut c.model),
        Row::<Self>::new(
            "cloud",
            "CLOUD",
            "imitate a cloud's disk: amazon:DEVICE, google:NAME or azure. Sets the vendor-specific \
             bytes in which the cloud's images look for device names, the PCI IDs, and the model \
             number unless model is set",
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
            "name of the disk's NVM subsystem. Disks of a subsystem share the namespaces of equal \
             NSID, with reservations; each disk is served by one worker",
            |c| &mut c.subsystem,
        )
        .or("a subsystem for each disk"),
        Row::<Self>::new(
            "cntlid",
            "N",
            "controller ID, unique in its subsystem; required with subsystem",
            |c| &mut c.cntlid,
        )
        .range(0, 65_519)
        .or("1"),
        Row::<Self>::new(
            "host-id",
            "HEX",
            "with subsystem: Host Identifier of the disk's guest, 32 hexadecimal digits, which \
             owns its reservations. All disks of a guest have the same; the guest cannot change it",
            |c| &mut c.host_id,
        )
        .or("derived from the disk's name"),
        Row::<Self>::new("io-queues", "N", "I/O queue pairs, 1 to 128", |c| {
            &mut c.io_queues
        })
        .or("64")
        .serve(Flag::default("io-queues")),
        Row::<Self>::new(
            "queue-entries",
            "N",
            "entries of each queue, a power of two from 2 to 4096",
            |c| &mut c.queue_entries,
        )
        .or("4096")
        .serve(Flag::default("queue-entries")),
        mdts(|c| &mut c.mdts),
        Row::<Self>::new(
            "max-namespaces",
            "N",
            "highest NSID of the controller (NN); leaves room for namespaces attached at run time",
            |c| &mut c.max_namespaces,
        )
        .range(1, 1024)
        .or("the highest configured; at least 16 under vnvme daemon, and with pool"),
        Row::<Self>::new(
            "pool",
            "PATH",
            "existing folder for namespaces that the guest creates, each a file (nvme create-ns, \
             attach-ns, detach-ns, delete-ns); belongs to one disk",
            |c| &mut c.pool,
        )
        .or("none"),
        Row::<Self>::new(
            "pool-capacity",
            "SIZE",
            "total capacity of the guest's namespaces (TNVMCAP; UNVMCAP is the unallocated part); \
             the files are sparse",
            |c| &mut c.pool_capacity,
        )
        .or("required with pool"),
        Row::<Self>::new(
            "pool-block-size",
            "512|4096",
            "logical block size in bytes of namespaces that the guest creates from now on",
            |c| &mut c.pool_block_size,
        )
        .or("512"),
    ];
    const NESTED: &'static [(&'static str, bool)] = &[("namespace", true)];
    const PROCESS_FLAGS: &'static [&'static str] = &["spread"];

    fn nested<'de, A: MapAccess<'de>>(&mut self, _: &str, map: &mut A) -> Result<(), A::Error> {
        self.namespaces = file::tables(map, "namespace", Self::TABLE)?;
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
        Row::<Self>::new("queues", "N", "maximum number of request queues", |e| {
            &mut e.queues
        })
        .or("128")
        .in_url(),
        Row::<Self>::new(
            "queue-size",
            "N",
            "entries of a queue to size requests for (seg_max is two less)",
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
        .or("derived from the volume, stable")
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
            "address to listen on; the standard port is 4420",
            |t| &mut t.listen,
        )
        .required(),
        Row::<Self>::new("hosts", "NQNS", "NQNs of the hosts that may connect", |t| {
            &mut t.hosts
        })
        .or("every host that can reach the address"),
        Row::<Self>::new(
            "host-keys",
            "PATH",
            "file of the hosts that may connect and their DH-HMAC-CHAP secrets: on each line an \
             NQN, its DHHC-1 secret, and optionally the secret of the subsystem. Without it, only \
             a loopback address can be listened on",
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
        Row::<Self>::new("queue-entries", "N", "entries of each I/O queue", |t| {
            &mut t.queue_entries
        })
        .range(2, 256)
        .or("128"),
        mdts(|t| &mut t.mdts),
        Row::<Self>::new("max-hosts", "N", "maximum number of connected hosts", |t| {
            &mut t.max_hosts
        })
        .range(1, 1024)
        .or("64"),
    ];
    const NESTED: &'static [(&'static str, bool)] = &[("namespace", true)];

    fn nested<'de, A: MapAccess<'de>>(&mut self, _: &str, map: &mut A) -> Result<(), A::Error> {
        self.namespaces = file::tables(map, "namespace", Self::TABLE)?;
        Ok(())
    }
}

impl Spec for UblkSpec {
    const TABLE: &'static str = "[[ublk]]";
    const NAMES: &'static str = "block devices";
    const ROWS: &'static [Row<Self>] = &[
        name::<Self>(|d| &mut d.name).or("the name of the device, ublkbN"),
        volume(|d| &mut d.volume),
        Row::<Self>::new("id", "N", "number of the device, N in /dev/ublkbN", |d| {
            &mut d.id
        })
        .or("a free number")
        .ublk(
            Flag::default("id")
                .help("number of the first device, N in /dev/ublkbN; the other devices follow"),
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
            "keep the device when the process is killed: requests wait for the next process with \
             the same id",
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
            "controller" => self.controllers = file::tables(map, key, "")?,
            "vhost-user-blk" => self.vhost_user_blk = file::tables(map, key, "")?,
            "nvme-tcp" => self.nvme_tcp = file::tables(map, key, "")?,
            "ublk" => self.ublk = file::tables(map, key, "")?,
            _ => self.process = map.next_value()?,
        }
        Ok(())
    }
}
