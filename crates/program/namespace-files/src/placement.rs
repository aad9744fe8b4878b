//! Flexible Data Placement: the options of a namespace's placement handles, and the file that
//! stores their state.

use crate::table_file;
use anyhow::{Context, Result, ensure};
use config::identity;
use config::options::Size;
use config::spec::NamespaceSpec;
use controller::{PlacementState, PlacementTable};
use placement::{Geometry, Identity, table};
use std::path::Path;
use std::sync::Arc;
use volume::{PreviousProcess, Volume};

/// Default size of a reclaim unit in bytes.
const UNIT: u64 = 256 << 20;

/// Opens the placement handles of a namespace on this volume; returns `None` if it has none.
///
/// # Errors
/// A message for the user when the options conflict or the file cannot be opened.
pub fn open(
    spec: &NamespaceSpec,
    volume: &Arc<dyn Volume>,
    previous: PreviousProcess,
) -> Result<Option<Arc<PlacementState>>> {
    let Some(handles) = spec.fdp_handles else {
        return Ok(None);
    };
    let url = &*spec.volume;
    let block = spec.block_size;
    let block = block.unwrap_or_else(|| volume.info().block_size.max(512));
    let unit = spec.fdp_unit.map_or(UNIT, |Size(unit)| unit);
    let whole = unit > 0 && unit.is_multiple_of(block.into());
    ensure!(
        whole,
        "{url}: fdp-unit is {unit} bytes: whole blocks of {block} bytes are allowed"
    );
    let geometry = Geometry {
        handles: u16::try_from(handles).unwrap_or(u16::MAX),
        unit: unit / u64::from(block),
        block,
    };
    geometry.check().with_context(|| url.to_owned())?;
    let state = match &spec.fdp_table {
        Some(path) => {
            let identity = Identity {
                namespace: identity::nguid("fdp", 1, &volume.id()),
            };
            kept(path, geometry, identity, previous).with_context(|| format!("{url}: fdp-table"))?
        }
        None => {
            let mut ending = ["mem://", "null://"].iter();
            ensure!(
                ending.any(|kind| url.starts_with(kind)) && volume.kept_memory().is_none(),
                "{url}: fdp-handles needs fdp-table, the file of the counters (optional only for \
                 mem:// and null://)"
            );
            PlacementState::in_memory(geometry)?
        }
    };
    Ok(Some(Arc::new(state)))
}

/// Opens the file of placement handles, which is created if it does not exist.
fn kept(
    path: &Path,
    geometry: Geometry,
    identity: Identity,
    previous: PreviousProcess,
) -> Result<PlacementState> {
    let fresh = || Ok(table::encode(&geometry, identity));
    let (volume, pages) = table_file::open(path, fresh, previous)?;
    let shown = path.display();
    let bytes = table_file::read(&pages, table::len(geometry.handles))?;
    table::check(&bytes, &geometry, identity)
        .with_context(|| format!("{shown}: removing the file resets all counters"))?;
    let kept = PlacementTable::new(&pages, geometry.handles, Some(Arc::new(volume)));
    let kept = kept.with_context(|| format!("{shown}: the file is shorter than the table"))?;
    Ok(PlacementState::new(geometry, kept)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::options::url::parse;

    fn handles(url: &str) -> Result<Option<Arc<PlacementState>>> {
        let volume: Arc<dyn Volume> = Arc::new(volume::MemVolume::new(1 << 20).unwrap());
        open(&parse(url).unwrap(), &volume, PreviousProcess::default())
    }

    fn error(url: &str) -> String {
        format!("{:#}", handles(url).err().unwrap())
    }

    #[test]
    fn invalid_placement_options_are_refused_with_reason() {
        assert!(handles("mem://1M").unwrap().is_none());
        assert!(handles("mem://1M?fdp-handles=8").unwrap().is_some());
        for (options, said) in [
            ("fdp-handles=2&fdp-unit=700", "whole blocks of 512 bytes"),
            ("fdp-handles=2&fdp-unit=0", "whole blocks of 512 bytes"),
            ("fdp-handles=2&fdp-unit=1024T", "1 to 2^40"),
        ] {
            let text = error(&format!("mem://1M?{options}"));
            assert!(text.contains(said), "{options}: {text}");
        }
        assert!(error("disk.raw?fdp-handles=2").contains("fdp-table"));
    }

    #[test]
    fn placement_file_is_created_and_bound_to_volume() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fdp");
        let url = format!("mem://1M?fdp-handles=4&fdp-table={}", path.display());
        drop(handles(&url).unwrap().unwrap());
        let len = std::fs::metadata(&path).unwrap().len();
        assert_eq!(len, table_file::PAGE as u64 * 2);
        drop(handles(&url).unwrap().unwrap());
        let more = url.replace("handles=4", "handles=5");
        assert!(error(&more).contains("4 handles with units"));
        std::fs::write(&path, [7; table_file::PAGE]).unwrap();
        assert!(error(&url).contains("not a table of placement handles"));
    }
}
