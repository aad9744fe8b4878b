//! Values of features as engines use them.

use super::Coalescing;

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
