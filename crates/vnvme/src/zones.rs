//! Zoned namespaces: what a user says of their zones, and the file that these are kept in.

use crate::identity;
use crate::options::Size;
use crate::spec::NamespaceSpec;
use crate::table_file;
use anyhow::{Context, Result, bail, ensure};
use controller::{ZoneTable, ZonedState};
use std::path::Path;
use std::sync::Arc;
use volume::{PreviousProcess, Volume};
use zones::table::{self, Identity};
use zones::{Geometry, Zones};

/// The zones of a namespace on this volume, if it is to have any.
///
/// # Errors
/// A sentence for the user.
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
                "{url}: zone-size needs zone-table, a file that keeps the zones: the volume is \
                 there when this process has ended"
            );
            ZonedState::new(Zones::new(geometry)?, None)
        }
    };
    Ok(Some(Arc::new(state)))
}

fn geometry(spec: &NamespaceSpec, size: u64, block: u64, bytes: u64) -> Result<Geometry> {
    let capacity = spec.zone_capacity.map_or(size, |Size(capacity)| capacity);
    for (key, value) in [("zone-size", size), ("zone-capacity", capacity)] {
        let whole = value > 0 && value.is_multiple_of(block);
        ensure!(
            whole,
            "{key} is {value} bytes: whole blocks of {block} bytes are allowed"
        );
    }
    let count = bytes / size;
    ensure!(
        count > 0,
        "the volume has {bytes} bytes, and a zone {size}: there is room for none"
    );
    let geometry = Geometry {
        zones: u32::try_from(count).unwrap_or(u32::MAX),
        size: size / block,
        capacity: capacity / block,
        max_open: spec.max_open_zones.or(spec.max_active_zones),
        max_active: spec.max_active_zones,
    };
    geometry.check()?;
    Ok(geometry)
}

/// The zones in a file, which is made if it is not there.
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
    let zones = table::decode(&bytes, geometry, identity).with_context(|| {
        format!("{shown}: to remove the file is to have all zones empty, whatever is in them")
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
    use crate::options::url::parse;

    fn zones(url: &str, size: u64) -> Result<Option<Arc<ZonedState>>> {
        let volume: Arc<dyn Volume> = Arc::new(volume::MemVolume::new(size).unwrap());
        open(&parse(url).unwrap(), &volume, PreviousProcess::default())
    }

    fn error(url: &str) -> String {
        format!("{:#}", zones(url, 1 << 20).err().unwrap())
    }

    #[test]
    fn what_cannot_be_is_said_in_words() {
        assert!(zones("mem://1M", 1 << 20).unwrap().is_none());
        assert!(zones("mem://1M?zone-size=64K", 1 << 20).unwrap().is_some());
        for (options, said) in [
            ("zone-size=96K", "a power of two"),
            ("zone-size=700", "whole blocks of 512 bytes"),
            ("zone-size=2M", "room for none"),
            ("zone-size=64K&zone-capacity=128K", "1 to its size"),
            (
                "zone-size=64K&max-open-zones=3&max-active-zones=2",
                "no more open ones",
            ),
        ] {
            let text = error(&format!("mem://1M?{options}"));
            assert!(text.contains(said), "{options}: {text}");
        }
        assert!(error("disk.raw?zone-size=64K").contains("zone-table"));
    }

    #[test]
    fn the_file_is_made_and_is_another_volumes() {
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
        assert!(error(&url).contains("no table of zones"));
    }
}
