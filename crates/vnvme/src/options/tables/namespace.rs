//! The options of a controller's namespaces.

use super::super::{Row, Spec, Url};
use super::{block_size, on_read_error, on_write_error, read_only, volume};
use crate::spec::NamespaceSpec;
use controller::MAX_ANA_GROUP;
use placement::MAX_HANDLES;

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
        Row::<Self>::new("uuid", "HEX", "UUID, 32 hexadecimal digits", |n| {
            &mut n.uuid
        })
        .or("the NGUID")
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
