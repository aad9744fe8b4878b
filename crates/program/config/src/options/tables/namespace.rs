//! Options of a controller's namespaces.

use super::super::{Row, Spec, Url};
use super::{block_size, on_read_error, on_write_error, read_only, volume};
use crate::spec::NamespaceSpec;
use controller::MAX_ANA_GROUP;
use placement::MAX_HANDLES;

impl Spec for NamespaceSpec {
    const TABLE: &'static str = "[[controller.namespace]]";
    const NAMES: &'static str = "namespaces";
    const ABOUT: &'static str = "A namespace of the controller above it; at least one for each.";
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
        .or("derived from serial number and volume")
        .in_url(),
        Row::<Self>::new("eui64", "HEX", "EUI-64, 16 hexadecimal digits", |n| {
            &mut n.eui64
        })
        .or("derived from serial number and volume")
        .in_url(),
        Row::<Self>::new("uuid", "HEX", "UUID, 32 hexadecimal digits", |n| {
            &mut n.uuid
        })
        .or("the NGUID")
        .in_url(),
        Row::<Self>::new(
            "path",
            "direct|generic",
            "path of commands to a device: direct (translated, queue to queue) or generic (through \
             the volume)",
            |n| &mut n.path,
        )
        .or("direct where possible")
        .in_url(),
        Row::<Self>::new(
            "reservations",
            "PATH",
            "with subsystem: file of the namespace's reservations, created if missing. \
             Reservations survive the process, and a power loss if the host asks for that (PTPL)",
            |n| &mut n.reservations,
        )
        .or("reservations end with the process"),
        Row::<Self>::new(
            "zone-size",
            "SIZE",
            "size of a zone, a power of two; makes the namespace zoned. The rest of the volume \
             behind the last zone is unused",
            |n| &mut n.zone_size,
        )
        .or("no zones")
        .in_url(),
        Row::<Self>::new(
            "zone-capacity",
            "SIZE",
            "writable capacity of a zone",
            |n| &mut n.zone_capacity,
        )
        .or("the zone size")
        .in_url(),
        Row::<Self>::new("max-open-zones", "N", "maximum number of open zones", |n| {
            &mut n.max_open_zones
        })
        .range(1, u32::MAX)
        .or("as max-active-zones")
        .in_url(),
        Row::<Self>::new(
            "max-active-zones",
            "N",
            "maximum number of open and closed zones",
            |n| &mut n.max_active_zones,
        )
        .range(1, u32::MAX)
        .or("all zones")
        .in_url(),
        Row::<Self>::new(
            "zrwa-size",
            "SIZE",
            "size of the Zone Random Write Area (ZRWA) behind the write pointer, in which the \
             guest may write and overwrite blocks in any order",
            |n| &mut n.zrwa_size,
        )
        .or("no ZRWA")
        .in_url(),
        Row::<Self>::new(
            "zrwa-granularity",
            "SIZE",
            "flush granularity of a random write area: the unit in which the write pointer \
             advances. The area and the zone capacity are multiples of it",
            |n| &mut n.zrwa_granularity,
        )
        .or("one block")
        .in_url(),
        Row::<Self>::new(
            "zrwa-resources",
            "N",
            "maximum number of zones with a random write area",
            |n| &mut n.zrwa_resources,
        )
        .range(1, u32::MAX)
        .or("as max-active-zones")
        .in_url(),
        Row::<Self>::new(
            "zone-table",
            "PATH",
            "file of zone states and write pointers, created with empty zones if missing. Optional \
             only for volumes that end with the process (mem, null)",
            |n| &mut n.zone_table,
        )
        .or("none")
        .in_url(),
        Row::<Self>::new(
            "fdp-handles",
            "N",
            "number of placement handles (Flexible Data Placement) with which a host groups its \
             writes; writes are counted in reclaim units",
            |n| &mut n.fdp_handles,
        )
        .range(1, MAX_HANDLES as u32)
        .or("none")
        .in_url(),
        Row::<Self>::new("fdp-unit", "SIZE", "size of a reclaim unit", |n| {
            &mut n.fdp_unit
        })
        .or("256M")
        .in_url(),
        Row::<Self>::new(
            "fdp-table",
            "PATH",
            "file of the placement handles' counters, settings and events, created if missing. \
             Optional only for volumes that end with the process (mem, null)",
            |n| &mut n.fdp_table,
        )
        .or("none")
        .in_url(),
        Row::<Self>::new(
            "metadata",
            "PATH",
            "file of the blocks' metadata, created as for unwritten blocks if missing. Optional \
             only for volumes in memory (mem) without format-file",
            |n| &mut n.metadata,
        )
        .or("none")
        .in_url(),
        Row::<Self>::new(
            "metadata-size",
            "N",
            "metadata bytes of each block: 8, 16 or 64; the disk is then served by one worker",
            |n| &mut n.metadata_size,
        )
        .or("no metadata")
        .in_url(),
        Row::<Self>::new(
            "metadata-extended",
            "on|off",
            "metadata follows each block's data (extended LBAs) instead of using a separate buffer",
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
            "size of the protection information's guard in bits; 32 and 64 need blocks of 4096 \
             bytes and at least 16 bytes of metadata",
            |n| &mut n.guard,
        )
        .or("16")
        .in_url(),
        Row::<Self>::new(
            "protection-first",
            "on|off",
            "protection information in the first bytes of the metadata instead of the last",
            |n| &mut n.protection_first,
        )
        .or("off")
        .in_url(),
        Row::<Self>::new(
            "storage-tag",
            "N",
            "bits of the storage tag in the protection information; the reference tag has the \
             rest. Guard of 16 bits: 0 to 32; of 32 bits: 16 to 64; of 64 bits: 0 to 48",
            |n| &mut n.storage_tag,
        )
        .or("0; with a guard of 32 bits 16")
        .in_url(),
        Row::<Self>::new(
            "storage-tag-mask",
            "BITS",
            "mask of the storage tag's bits to compare, like 0xff00",
            |n| &mut n.storage_tag_mask,
        )
        .or("all bits")
        .in_url(),
        Row::<Self>::new(
            "format-file",
            "PATH",
            "file of the LBA format that the guest chose with Format NVM, created if missing; \
             enables Format NVM. Format 0 is the configured format, followed by those without \
             metadata that the volume supports",
            |n| &mut n.format_file,
        )
        .or("a single LBA format")
        .in_url(),
        Row::<Self>::new(
            "ana-group",
            "N",
            "with subsystem: ANA group of the namespace (ANAGRPID), the same in all its disks. \
             Each disk reports a state for each group",
            |n| &mut n.ana_group,
        )
        .range(1, MAX_ANA_GROUP)
        .or("1"),
        Row::<Self>::new(
            "ana-state",
            "STATE",
            "with subsystem: initial state of the namespace's ANA group as seen through this disk, \
             until changed by vnvme ana; the same for all of the disk's namespaces in the group",
            |n| &mut n.ana_state,
        )
        .or("optimized"),
    ];

    fn volume(&mut self) -> Option<&mut Url> {
        Some(&mut self.volume)
    }
}
