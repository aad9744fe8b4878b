//! The options, by what they are options of.
//!
//! A new option is a row here and a field of the structure that it sets.

use super::{Flag, Row, Setting, Spec, Url};
use crate::spec::MAX_WORKERS;
use crate::spec::NvmeTcpSpec;
use crate::spec::UblkSpec;
use crate::spec::VhostBlkSpec;
use crate::spec::{ControllerSpec, NamespaceSpec, ProcessSpec, Specs};
use controller::MAX_ANA_GROUP;
use placement::MAX_HANDLES;
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

impl Spec for NamespaceSpec {
    const TABLE: &'static str = "[[controller.namespace]]";
    const NAMES: &'static str = "namespaces";
    const ROWS: &'static [Row<Self>] = &[
        volume(|n| &mut n.volume),
        read_only(|n| &mut n.read_only),
        block_size(|n| &mut n.block_size),
        on_read_error(|n| &mut n.on_read_error),
        on_write_error(|n| &mut n.on_write_error),
        Row::<Self>::new("nsid", "N", "namespace ID", |n| &mut n.nsid)
            .or("by position, from 1")
            .in_url(),
        Row::<Self>::new("nguid", "HEX", "NGUID, 32 hexadecimal digits", |n| {
            &mut n.nguid
        })
        .or("made from serial number and volume")
        .in_url(),
        Row::<Self>::new("eui64", "HEX", "EUI-64, 16 hexadecimal digits", |n| {
            &mut n.eui64
        })
        .or("made from serial number and volume")
        .in_url(),
        Row::<Self>::new(
            "path",
            "direct|generic",
            "how commands reach a device: as they are, or through the volume",
            |n| &mut n.path,
        )
        .or("direct where that is possible")
        .in_url(),
        Row::<Self>::new(
            "reservations",
            "PATH",
            "of disks in a subsystem: file that keeps the namespace's reservations, so that they \
             outlast this process, and a loss of power if a host asks for that; made if it is not \
             there",
            |n| &mut n.reservations,
        )
        .or("they end with the process"),
        Row::<Self>::new(
            "zone-size",
            "SIZE",
            "make it a zoned namespace, of zones of this size, a power of two; what is left of the \
             volume behind the last zone is not used",
            |n| &mut n.zone_size,
        )
        .or("no zones")
        .in_url(),
        Row::<Self>::new(
            "zone-capacity",
            "SIZE",
            "how much of a zone can be written",
            |n| &mut n.zone_capacity,
        )
        .or("all of it")
        .in_url(),
        Row::<Self>::new(
            "max-open-zones",
            "N",
            "zones that may be open at a time",
            |n| &mut n.max_open_zones,
        )
        .range(1, u32::MAX)
        .or("as many as may be active")
        .in_url(),
        Row::<Self>::new(
            "max-active-zones",
            "N",
            "zones that may be open or closed at a time",
            |n| &mut n.max_active_zones,
        )
        .range(1, u32::MAX)
        .or("all")
        .in_url(),
        Row::<Self>::new(
            "zrwa-size",
            "SIZE",
            "let the guest open zones with a Zone Random Write Area (ZRWA) of this size, behind \
             the write pointer, in which blocks are written in any order, and again",
            |n| &mut n.zrwa_size,
        )
        .or("no such areas")
        .in_url(),
        Row::<Self>::new(
            "zrwa-granularity",
            "SIZE",
            "what the write pointer of a zone with a random write area moves by, of which the area \
             and the zone's capacity are multiples",
            |n| &mut n.zrwa_granularity,
        )
        .or("a block")
        .in_url(),
        Row::<Self>::new(
            "zrwa-resources",
            "N",
            "zones that may have a random write area at a time",
            |n| &mut n.zrwa_resources,
        )
        .range(1, u32::MAX)
        .or("as many as may be active")
        .in_url(),
        Row::<Self>::new(
            "zone-table",
            "PATH",
            "file that keeps states and write pointers of the zones; made, of empty zones, if it \
             is not there. Only volumes that end with the process (mem, null) do without",
            |n| &mut n.zone_table,
        )
        .or("none")
        .in_url(),
        Row::<Self>::new(
            "fdp-handles",
            "N",
            "give it placement handles (Flexible Data Placement), by which a host groups what it \
             writes; what is written by each is counted in reclaim units",
            |n| &mut n.fdp_handles,
        )
        .range(1, MAX_HANDLES as u32)
        .or("none")
        .in_url(),
        Row::<Self>::new(
            "fdp-unit",
            "SIZE",
            "size of a reclaim unit",
            |n| &mut n.fdp_unit,
        )
        .or("256M")
        .in_url(),
        Row::<Self>::new(
            "fdp-table",
            "PATH",
            "file that keeps the counts, settings and events of the placement handles; made if it \
             is not there. Only volumes that end with the process (mem, null) do without",
            |n| &mut n.fdp_table,
        )
        .or("none")
        .in_url(),
        Row::<Self>::new(
            "metadata",
            "PATH",
            "file that keeps the metadata of the blocks; made, of blocks that were never written, \
             if it is not there. Only volumes in memory that end with the process (mem) do \
             without, and these not with format-file",
            |n| &mut n.metadata,
        )
        .or("none")
        .in_url(),
        Row::<Self>::new(
            "metadata-size",
            "N",
            "give each block so many bytes of metadata: 8, 16 or 64; the disk then lives on one \
             worker",
            |n| &mut n.metadata_size,
        )
        .or("no metadata")
        .in_url(),
        Row::<Self>::new(
            "metadata-extended",
            "on|off",
            "hosts have the metadata behind each block's data (extended LBAs), not in a buffer of \
             its own",
            |n| &mut n.metadata_extended,
        )
        .or("off")
        .in_url(),
        Row::<Self>::new(
            "protection",
            "N",
            "type of end-to-end protection information in the metadata, 1 to 3; 0 for none",
            |n| &mut n.protection,
        )
        .or("0")
        .in_url(),
        Row::<Self>::new(
            "guard",
            "16|32|64",
            "size of protection information's guard: 16, or, for blocks of 4096 bytes with 16 \
             bytes of metadata or more, 32 or 64",
            |n| &mut n.guard,
        )
        .or("16")
        .in_url(),
        Row::<Self>::new(
            "protection-first",
            "on|off",
            "protection information is in the first bytes of the metadata, not the last ones",
            |n| &mut n.protection_first,
        )
        .or("off")
        .in_url(),
        Row::<Self>::new(
            "storage-tag",
            "N",
            "bits of protection information's storage tag, which commands may have compared; the \
             reference tag has the rest. With a guard of 16 bits 0 to 32, of 32 bits 16 to 64, of \
             64 bits 0 to 48",
            |n| &mut n.storage_tag,
        )
        .or("0, with a guard of 32 bits 16")
        .in_url(),
        Row::<Self>::new(
            "storage-tag-mask",
            "BITS",
            "those bits of the storage tag that are compared, like 0xff00",
            |n| &mut n.storage_tag_mask,
        )
        .or("all of them")
        .in_url(),
        Row::<Self>::new(
            "format-file",
            "PATH",
            "let the guest choose the block size (Format NVM), and with metadata also the size of \
             metadata and its protection: format 0 is the configured one, then come those without \
             metadata, as far as the volume can have them; the file keeps the choice, and is made \
             if it is not there",
            |n| &mut n.format_file,
        )
        .or("one LBA format")
        .in_url(),
        Row::<Self>::new(
            "ana-group",
            "N",
            "of disks in a subsystem: ANA group of the namespace (ANAGRPID), the same for all of \
             the disks: each disk reports a state for each group",
            |n| &mut n.ana_group,
        )
        .range(1, MAX_ANA_GROUP)
        .or("1"),
        Row::<Self>::new(
            "ana-state",
            "STATE",
            "of disks in a subsystem: how this disk's host reaches the namespace's ANA group, until \
             vnvme ana says otherwise; the same for all namespaces of the group that the disk has",
            |n| &mut n.ana_state,
        )
        .or("optimized"),
    ];

    fn volume(&mut self) -> Option<&mut Url> {
        Some(&mut self.volume)
    }
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
        Row::<Self>::new("io-queues", "N", "I/O queue pairs, 1 to 64", |c| {
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

/// Without a flag: what it is the default of has the flag.
const fn only_in_file<S>(row: Row<S>) -> Row<S> {
    Row { serve: None, ..row }
}

/// A flag of whatever serves.
const fn both<S>(row: Row<S>) -> Row<S> {
    let flag = Flag::overrides(row.key);
    row.serve(flag).ublk(flag)
}

impl Spec for ProcessSpec {
    const TABLE: &'static str = "[process]";
    const NAMES: &'static str = "processes";
    const ROWS: &'static [Row<Self>] = &[
        both(
            Row::<Self>::new(
                "idle-window",
                "MICROSECONDS",
                "poll for this long after the last work before sleeping: microseconds, or auto, \
                 from 20 to 1000 as the load has it",
                |p| &mut p.idle_window,
            )
            .or("auto"),
        ),
        both(
            Row::<Self>::new(
                "pin-memory",
                "on|off",
                "pin guests' memory (and ublk's buffers) for the kernel's I/O to files and block \
                 devices (io_uring's fixed buffers): less work for each request; all of the memory \
                 is allocated soon after it was attached, counts against the limit of locked \
                 memory (ulimit -l) unless root, and must not be reclaimed by a balloon",
                |p| &mut p.pin_memory,
            )
            .or("off"),
        ),
        both(
            Row::<Self>::new(
                "sqpoll",
                "on|off",
                "let a thread of the kernel take each thread's requests to files and block devices \
                 (io_uring's SQPOLL): no system call to submit, for one more CPU that is busy \
                 while there is work",
                |p| &mut p.sqpoll,
            )
            .or("off"),
        ),
        Row::<Self>::new(
            "workers",
            "N",
            "worker threads: controllers, exports and queues of block devices are assigned to them \
             in turn, and a controller's queues migrate to those that have time",
            |p| &mut p.workers,
        )
        .range(1, MAX_WORKERS as u32)
        .or("1")
        .serve(Flag::overrides("workers"))
        .ublk(Flag::overrides("workers").help(
            "worker threads: queues are assigned to them in turn \
             [default: one for each queue of a device]",
        )),
        Row::<Self>::new(
            "spread",
            "MODE",
            "what becomes of a controller's queues where there are several workers",
            |p| &mut p.spread,
        )
        .or("auto")
        .serve(Flag::overrides("spread")),
        both(
            Row::<Self>::new(
                "cpus",
                "LIST",
                "CPUs to pin the workers to, one each, like 2,3 or 0-3",
                |p| &mut p.cpus,
            )
            .or("not pinned"),
        ),
        both(
            Row::<Self>::new(
                "stop-timeout",
                "SECONDS",
                "at the end, how long to wait for volumes that may hang (FUSE, network file \
                 systems) and answer nothing, and for a worker that makes no round; then the \
                 process ends without them, with exit code 3. Disks of this machine are waited for \
                 until nothing of them has completed for a minute",
                |p| &mut p.stop_timeout,
            )
            .range(1, 3600)
            .or("4"),
        ),
        both(
            Row::<Self>::new(
                "previous-timeout",
                "SECONDS",
                "how long a file or block device is waited for, at the beginning, whose previous \
                 process was killed and has left requests that the kernel still works on: a late \
                 one would undo what is written now",
                |p| &mut p.previous_timeout,
            )
            .range(1, 86_400)
            .or("30"),
        ),
        Row::<Self>::new(
            "client-windows",
            "N",
            "windows of guest memory that a client of a controller may map at a time; it is told \
             so (max_dma_maps)",
            |p| &mut p.client_windows,
        )
        .range(1, 65_535)
        .or("65535")
        .serve(Flag::overrides("client-windows")),
        Row::<Self>::new(
            "client-memory",
            "SIZE",
            "largest sum of the sizes of one client's memory files",
            |p| &mut p.client_memory,
        )
        .or("4T")
        .serve(Flag::overrides("client-memory")),
        Row::<Self>::new(
            "client-files",
            "N",
            "memory files that one client may have mapped at a time",
            |p| &mut p.client_files,
        )
        .range(1, 16_384)
        .or("512")
        .serve(Flag::overrides("client-files")),
        Row::<Self>::new(
            "client-connects",
            "N",
            "clients that each socket, the control socket too, accepts in a second; more wait \
             until they may come in",
            |p| &mut p.client_connects,
        )
        .range(1, 1_000_000)
        .or("50")
        .serve(Flag::overrides("client-connects")),
        only_in_file(socket_owner(|p| &mut p.access.owner)),
        only_in_file(socket_group(|p| &mut p.access.group)),
        only_in_file(socket_mode(|p| &mut p.access.mode)),
        Row::<Self>::new(
            "control",
            "PATH",
            "control socket: where \"vnvme list\", stats and the other commands for a running \
             process ask; none: there is none. VNVME_CONTROL says the same",
            |p| &mut p.control,
        )
        .or("control.sock in RUNTIME_DIRECTORY, or /run/vnvme for root, or vnvme in XDG_RUNTIME_DIR")
        .serve(Flag::overrides("control"))
        .ublk(Flag::overrides("control")),
        both(Row::<Self>::new(
            "metrics",
            "ADDRESS:PORT",
            "IP address and TCP port where Prometheus may read /metrics, and nothing else; so may \
             everybody who can connect there",
            |p| &mut p.metrics,
        )),
        both(Row::<Self>::new(
            "control-group",
            "GROUP",
            "group, by name or number, whose members may ask questions and change nothing: at a \
             socket beside the control socket whose name has -ro before its end",
            |p| &mut p.control_group,
        )),
        both(
            Row::<Self>::new(
                "sandbox",
                "MODE",
                "give up, once everything is open, what serving does not need: other files, the \
                 network, capabilities, most system calls",
                |p| &mut p.sandbox,
            )
            .or("on"),
        ),
        both(
            Row::<Self>::new(
                "keeper",
                "MODE",
                "process: a process of its own keeps the sockets and the memory of NVMe disks' \
                 clients, and starts the process that serves them again when that is killed or \
                 fails: guests notice a pause (docs/survival.md). systemd: the service's store of \
                 descriptors (FileDescriptorStoreMax=) keeps them. auto: systemd where it has one for \
                 this service, else process; off where there are block devices of the host (ublk), or \
                 the configuration is no file",
                |p| &mut p.keeper,
            )
            .or("auto"),
        ),
        Row::<Self>::new(
            "allow",
            "LIST",
            "under vnvme daemon: folders below which files may be opened, and sockets be made, \
             while it runs; NBD servers and NVMe/TCP portals to connect to, as URLs; \"ublk\" allows \
             block devices of the host, with all of /dev. Without it, only disks that need no file \
             can be added in the sandbox",
            |p| &mut p.allow,
        )
        .or("nothing")
        .daemon(Flag::overrides("allow")),
        Row::<Self>::new(
            "state",
            "PATH",
            "under vnvme daemon: file in which disks are kept that were added while it runs, so \
             that they are there after a restart",
            |p| &mut p.state,
        )
        .or("they are forgotten")
        .daemon(Flag::overrides("state")),
    ];
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
