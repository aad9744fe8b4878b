//! Kind of volumes on servers: the properties of a protocol that a program needs beside the queue.

use crate::{Address, ConnectionKeeper, ReachWatch};
use std::sync::Arc;
use volume::{BareVolume, OpenError, OpenOptions, Scheme, Volume, VolumeKind, VolumeUrl};

/// Protocol of volumes on servers. Methods about features that most protocols lack have a default;
/// a new protocol answers all other questions.
pub trait RemoteKind: Send + Sync {
    /// Returns the URL schemes of the protocol.
    fn schemes(&self) -> &'static [Scheme];

    /// Opens the volume of a URL. A protocol whose fence is the end of the previous process's
    /// connections uses `keeper`.
    ///
    /// # Errors
    /// [`OpenError`] when the URL is invalid or the volume cannot be opened.
    fn open(
        &self,
        url: &mut VolumeUrl<'_>,
        options: OpenOptions,
        keeper: Option<Arc<dyn ConnectionKeeper>>,
    ) -> Result<(Arc<dyn Volume>, ReachWatch), OpenError>;

    /// Returns the servers that a URL of this protocol names, for a process that has to know its
    /// peers before it enters a sandbox. Empty where the protocol's own library finds them
    /// ([`RemoteKind::library_ports`]); `None` for a URL that cannot be parsed. A URL of nothing
    /// but a server's address (`SCHEME://HOST:PORT/`, `SCHEME:///?socket=PATH`) is enough.
    fn servers(&self, url: &str) -> Option<Vec<Address>>;

    /// Returns whether no request of a previous process can reach the server any more once this
    /// process has opened the volume. Only then may outstanding requests be executed again.
    fn is_fenced(&self) -> bool;

    /// Returns the TCP ports, on any host, of a protocol whose own library connects for it; `None`
    /// for a protocol without such a library. May load the library and read its configuration.
    fn library_ports(&self, _url: &str) -> Option<Vec<u16>> {
        None
    }

    /// Returns the reason why volumes cannot be opened inside a sandbox, if they cannot.
    fn needs_start(&self) -> Option<&'static str> {
        None
    }

    /// Returns the error for the URL of a server that other programs accept, and this one does not.
    fn foreign_url(&self, _url: &str) -> Option<&'static str> {
        None
    }

    /// Reads the files of this host that are needed whenever a volume is opened, before the process
    /// enters a sandbox.
    fn prepare(&self) {}
}

/// Returns the volume kinds of a protocol's schemes. Each opened volume passes its watch to
/// `opened`; `keeper` holds connections for the next process.
pub fn volume_kinds<X: 'static>(
    kind: &'static dyn RemoteKind,
    opened: impl Fn(ReachWatch) + Clone + Send + Sync + 'static,
    keeper: Option<Arc<dyn ConnectionKeeper>>,
) -> impl Iterator<Item = VolumeKind<X>> {
    kind.schemes().iter().map(move |scheme| {
        let (opened, keeper) = (opened.clone(), keeper.clone());
        VolumeKind::new(*scheme, move |url: &mut VolumeUrl<'_>, options| {
            let (volume, watch) = kind.open(url, options, keeper.clone())?;
            opened(watch);
            Ok(BareVolume::new(volume))
        })
    })
}
