//! Zoned namespaces: the options of their zones, and the file that stores the state of the zones.

use crate::table_file;
use anyhow::{Context, Result, bail, ensure};
use config::identity;
use config::options::Size;
use config::spec::NamespaceSpec;
use controller::{ZoneTable, ZonedState};
use std::path::Path;
use std::sync::Arc;
use volume::{PreviousProcess, Volume};
use zones::table::TableError;
use zones::table::{self, Identity};
use zones::{Geometry, Zones, Zrwa};

/// Opens the zones of a namespace on this volume; returns `None` if it is not zoned.
///
/// # Errors
/// A message for the user when the options conflict or the file cannot be opened.
pub fn open(
    spec: &NamespaceSpec,
    volume: &Arc<dyn Volume>,
    previous: PreviousProcess,
) -> Result<Option<Arc<ZonedState>>> {
    let Some(Size(size)) = spec.zone_size else {
        return Ok(None);
    };
    let url = &*spec.volume;
    let block = spec.block_size;
    let block = block.unwrap_or_else(|| volume.info().block_size.max(512));
    let geometry = geometry(spec, size, u64::from(block), volume.info().size)
        .with_context(|| format!("{url}: zones"))?;
    let state = match &spec.zone_table {
        Some(path) => {
            let identity = Identity {
                namespace: identity::nguid("zones", 1, &volume.id()),
                block,
            };
            kept(path, geometry, identity, previous)
                .with_context(|| format!("{url}: zone-table"))?
        }
        None => {
            let ends = ["mem://", "null://"]
                .iter()
                .any(|kind| url.starts_with(kind));
            ensure!(
                ends && volume.kept_memory().is_none(),
                "{url}: zone-size needs zone-table, the file of the zone states (optional only \
                 for mem:// and null://)"
            );
            ZonedState::new(Zones::new(geometry)?, None)
        }
    };
    Ok(Some(Arc::new(state)))
}

fn geometry(spec: &NamespaceSpec, size: u64, block: u64, bytes: u64) -> Result<Geometry> {
    let capacity = spec.zone_capacity.map_or(size, |Size(capacity)| capacity);
    let blocks = |key: &str, value: u64| {
        let whole = value > 0 && value.is_multiple_of(block);
        ensure!(
            whole,
            "{key} is {value} bytes: whole blocks of {block} bytes are allowed"
        );
        Ok(value / block)
    };
    let (blocks_of_size, capacity) = (
        blocks("zone-size", size)?,
        blocks("zone-capacity", capacity)?,
    );
    let count = bytes / size;
    ensure!(
        count > 0,
        "the volume has {bytes} bytes, less than a zone of {size}"
    );
    let geometry = Geometry {
        zones: u32::try_from(count).unwrap_or(u32::MAX),
        size: blocks_of_size,
        capacity,
        max_open: spec.max_open_zones.or(spec.max_active_zones),
        max_active: spec.max_active_zones,
        zrwa: zrwa(spec, block, blocks)?,
    };
    geometry.check()?;
    Ok(geometry)
}

/// Returns the geometry of the Zone Random Write Areas, if configured.
fn zrwa(
    spec: &NamespaceSpec,
    block: u64,
    blocks: impl Fn(&str, u64) -> Result<u64>,
) -> Result<Option<Zrwa>> {
    let Some(Size(size)) = spec.zrwa_size else {
        return Ok(None);
    };
    // The guest reads these values in fields of 16 bits.
    let few = |key: &str, value: u64| {
        let blocks = u16::try_from(blocks(key, value)?);
        blocks.with_context(|| format!("{key}: {} blocks at most are allowed", u16::MAX))
    };
    let granularity = spec.zrwa_granularity.map_or(block, |Size(by)| by);
    Ok(Some(Zrwa {
        size: few("zrwa-size", size)?,
        granularity: few("zrwa-granularity", granularity)?,
        resources: spec.zrwa_resources,
    }))
}

/// Opens the zone table file, which is created if it does not exist.
fn kept(
    path: &Path,
    geometry: Geometry,
    identity: Identity,
    previous: PreviousProcess,
) -> Result<ZonedState> {
    let fresh = || Ok(table::encode(&Zones::new(geometry)?, identity));
    let (volume, pages) = table_file::open(path, fresh, previous)?;
    let shown = path.display();
    let bytes = table_file::read(&pages, table::len(geometry.zones))?;
    let zones = table::decode(&bytes, geometry, identity).map_err(|error| match error {
        TableError::Zrwa(_) => anyhow::Error::new(error).context(format!(
            "{shown}: zrwa-size or zrwa-granularity differs from that of the table"
        )),
        _ => anyhow::Error::new(error).context(format!(
            "{shown}: removing the file makes all zones empty, whatever they contain"
        )),
    })?;
    let kept = ZoneTable::new(pages, geometry.zones, Arc::new(volume));
    let Some(kept) = kept else {
        bail!("{shown}: the file is shorter than the table of the zones");
    };
    Ok(ZonedState::new(zones, Some(kept)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::options::url::parse;

    fn zones(url: &str, size: u64) -> Result<Option<Arc<ZonedState>>> {
        let volume: Arc<dyn Volume> = Arc::new(volume::MemVolume::new(size).unwrap());
        open(&parse(url).unwrap(), &volume, PreviousProcess::default())
    }

    fn error(url: &str) -> String {
        format!("{:#}", zones(url, 1 << 20).err().unwrap())
    }

    #[test]
    fn invalid_zone_options_are_refused_with_reason() {
        assert!(zones("mem://1M", 1 << 20).unwrap().is_none());
        assert!(zones("mem://1M?zone-size=64K", 1 << 20).unwrap().is_some());
        for (options, said) in [
            ("zone-size=96K", "a power of two"),
            ("zone-size=700", "whole blocks of 512 bytes"),
            ("zone-size=2M", "less than a zone"),
            ("zone-size=64K&zone-capacity=128K", "1 to its size"),
            (
                "zone-size=64K&max-open-zones=3&max-active-zones=2",
                "no more open ones",
            ),
            ("zone-size=64K&zrwa-size=700", "zrwa-size is 700 bytes"),
            ("zone-size=64K&zrwa-size=0", "zrwa-size is 0 bytes"),
            (
                "zone-size=64K&zrwa-size=8K&zrwa-granularity=3K",
                "flushed by 6: a multiple",
            ),
            ("zone-size=64K&zrwa-size=128K", "256 blocks"),
            ("zone-size=64K&zrwa-size=32M", "65535 blocks at most"),
            (
                "zone-size=64K&zrwa-size=8K&max-active-zones=2&zrwa-resources=3",
                "no more than active zones",
            ),
        ] {
            let text = error(&format!("mem://1M?{options}"));
            assert!(text.contains(said), "{options}: {text}");
        }
        assert!(error("disk.raw?zone-size=64K").contains("zone-table"));
    }

    #[test]
    fn zrwa_options_become_geometry() {
        for (options, wanted) in [
            ("", None),
            ("&zrwa-size=8K", Some((16, 1, None))),
            (
                "&zrwa-size=8K&zrwa-granularity=2K&zrwa-resources=5",
                Some((16, 4, Some(5))),
            ),
        ] {
            let spec = parse(&format!("mem://1M?zone-size=64K{options}")).unwrap();
            let found = geometry(&spec, 64 << 10, 512, 1 << 20).unwrap().zrwa;
            let found = found.map(|zrwa| (zrwa.size, zrwa.granularity, zrwa.resources));
            assert_eq!(found, wanted);
        }
    }

    /// Checks that a file from a version without Zone Random Write Areas can be opened with them,
    /// and that a file in which zones have areas cannot be opened without.
    #[test]
    fn zone_file_gains_zrwa() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("zones");
        let url = format!("mem://1M?zone-size=64K&zone-table={}", path.display());
        let area = format!("{url}&zrwa-size=8K");
        drop(zones(&url, 1 << 20).unwrap().unwrap());
        drop(zones(&area, 1 << 20).unwrap().unwrap());
        let spec = parse(&area).unwrap();
        let mut state = Zones::new(geometry(&spec, 64 << 10, 512, 1 << 20).unwrap()).unwrap();
        state.open_with_zrwa(3).unwrap();
        let word = table::word(3, state.get(3).unwrap());
        let mut bytes = std::fs::read(&path).unwrap();
        let at = table::HEADER + 3 * table::WORD;
        bytes[at..at + table::WORD].copy_from_slice(&word.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        drop(zones(&area, 1 << 20).unwrap().unwrap());
        let text = error(&url);
        assert!(text.contains("zrwa-size or zrwa-granularity"), "{text}");
        assert!(text.contains("zone 3 has a random write area"), "{text}");
    }

    #[test]
    fn zone_file_is_created_and_bound_to_volume() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("zones");
        let url = format!("mem://1M?zone-size=64K&zone-table={}", path.display());
        drop(zones(&url, 1 << 20).unwrap().unwrap());
        assert_eq!(
            std::fs::metadata(&path).unwrap().len(),
            table_file::PAGE as u64
        );
        drop(zones(&url, 1 << 20).unwrap().unwrap());
        assert!(error(&url.replace("64K", "128K")).contains("16 zones of 128 blocks"));
        std::fs::write(&path, [7; table_file::PAGE]).unwrap();
        assert!(error(&url).contains("not a zone table"));
    }
}
