//! Files beside a volume that hold state of its namespace: zones, placement handles, the metadata
//! of blocks, and the LBA format that the host has chosen.
//!
//! [`NamespaceFiles`] opens the files that the options of a namespace name (crate `config`). A
//! module for each checks that its file belongs to the namespace and its geometry, and makes the
//! state that crate `controller` works on.
#![forbid(unsafe_code)]

mod formats;
mod metadata;
mod placement;
mod table_file;
mod zones;

pub use formats::BlockSizes;

use anyhow::Result;
use config::spec::NamespaceSpec;
use controller::{MetadataState, NamespaceConfig, PlacementState, ZonedState};
use formats::Chosen;
use std::sync::{Arc, Weak};
use volume::{PreviousProcess, Volume};

/// State of one namespace from the files beside its volume. Clones share it.
#[derive(Clone, Default)]
pub struct NamespaceFiles {
    /// Zones of the namespace; `None` for a namespace without zones.
    zones: Option<Arc<ZonedState>>,
    /// Data placement state; `None` for a namespace without placement handles.
    placement: Option<Arc<PlacementState>>,
    /// Metadata of the blocks; `None` for a namespace without metadata.
    metadata: Option<Arc<MetadataState>>,
    /// LBA formats that the host may choose from; `None` if there is only one.
    formats: Option<Chosen>,
}

impl NamespaceFiles {
    /// Opens the files that the options of a namespace name; none for a namespace without such
    /// options.
    ///
    /// # Errors
    /// A message for the user when the options conflict, a file cannot be opened, or a file belongs
    /// to another namespace.
    pub fn open(
        spec: &NamespaceSpec,
        volume: &Arc<dyn Volume>,
        previous: PreviousProcess,
    ) -> Result<Self> {
        Ok(Self {
            zones: zones::open(spec, volume, previous)?,
            placement: placement::open(spec, volume, previous)?,
            metadata: metadata::open(spec, volume, previous)?,
            formats: formats::open(spec, volume, previous)?,
        })
    }

    /// Returns whether the namespace has no such state, so that commands may bypass this process.
    pub fn is_empty(&self) -> bool {
        self.zones.is_none()
            && self.placement.is_none()
            && self.metadata.is_none()
            && self.formats.is_none()
    }

    /// Returns whether the namespace has zones.
    pub fn has_zones(&self) -> bool {
        self.zones.is_some()
    }

    /// Adds the state to a namespace's configuration.
    pub fn shape(self, config: NamespaceConfig) -> NamespaceConfig {
        let config = NamespaceConfig {
            zones: self.zones,
            placement: self.placement,
            metadata: self.metadata,
            ..config
        };
        Chosen::shape(self.formats, config)
    }

    /// Returns a reference that keeps neither zones nor files of placement and metadata open.
    pub fn downgrade(&self) -> WeakNamespaceFiles {
        WeakNamespaceFiles {
            zones: self.zones.as_ref().map(Arc::downgrade),
            placement: self.placement.as_ref().map(Arc::downgrade),
            metadata: self.metadata.as_ref().map(Arc::downgrade),
            formats: self.formats.clone(),
        }
    }
}

/// Reference to the state of a namespace that others hold.
#[derive(Clone, Default)]
pub struct WeakNamespaceFiles {
    zones: Option<Weak<ZonedState>>,
    placement: Option<Weak<PlacementState>>,
    metadata: Option<Weak<MetadataState>>,
    formats: Option<Chosen>,
}

impl WeakNamespaceFiles {
    /// Returns the state, unless a part of it has been closed.
    pub fn upgrade(&self) -> Option<NamespaceFiles> {
        fn upgraded<T>(part: Option<&Weak<T>>) -> Option<Option<Arc<T>>> {
            part.map_or(Some(None), |part| part.upgrade().map(Some))
        }
        Some(NamespaceFiles {
            zones: upgraded(self.zones.as_ref())?,
            placement: upgraded(self.placement.as_ref())?,
            metadata: upgraded(self.metadata.as_ref())?,
            formats: self.formats.clone(),
        })
    }
}
