//! Values of features as engines use them.

use super::Coalescing;
use super::commands::Offer;
use probes::LogLimits;
use std::sync::Arc;
use tracing::Span;

/// Values of the features that change how an engine executes commands.
#[derive(Clone, Copy)]
pub(crate) struct EngineFeatures {
    /// Volatile Write Cache. While off, every write is durable before it completes.
    pub write_cache: bool,
    /// Interrupt Coalescing and Interrupt Vector Configuration.
    pub coalescing: Coalescing,
    /// Bit mask of the Copy descriptor formats that the host has enabled (Host Behavior Support,
    /// CDFE), besides formats 0h and 1h.
    pub copy_formats: u16,
    /// Whether the host has enabled extended protection information formats (Host Behavior Support,
    /// LBAFEE).
    pub lbafee: bool,
}

impl Default for EngineFeatures {
    fn default() -> Self {
        EngineFeatures {
            write_cache: true,
            coalescing: Coalescing::default(),
            copy_formats: 0,
            lbafee: false,
        }
    }
}

/// Settings of an engine, which its commands do not change.
pub(crate) struct Settings {
    /// Values of the features that the host has set.
    pub features: EngineFeatures,
    /// Memory page size in bytes (CC.MPS).
    pub page_size: u64,
    pub max_transfer: u64,
    /// Properties of the controller that decide the commands it supports.
    pub offer: Offer,
    /// Names the disk in log lines.
    pub span: Span,
    /// Limits of the disk's log lines.
    pub log: Arc<LogLimits>,
}
