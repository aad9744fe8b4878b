//! One disk's failure is its own: whatever becomes of a disk's volume, all other disks of the
//! daemon are served, also by the process that follows one that was killed.

use crate::common::*;
use crate::keeper::{kill_serving, start};
use control::Client;
use std::fs;

/// A daemon with a keeper, whose disks are in a configuration file.
struct Domain {
    place: Place,
    daemon: Daemon,
    client: Client,
}

/// A controller with these volumes, and more lines of its table.
fn controller(place: &Place, name: &str, volumes: &[&str], more: &str) -> String {
    let socket = text(&place.path(&format!("{name}.sock")));
    let volumes = volumes
        .iter()
        .map(|url| format!("{{ volume = \"{url}\" }}"));
    let volumes: Vec<String> = volumes.collect();
    format!(
        "[[controller]]\nname = \"{name}\"\nsocket = \"{socket}\"\n{more}\nnamespace = [{}]\n",
        volumes.join(", ")
    )
}

impl Domain {
    fn start(place: Place, disks: &str) -> Self {
        let config = place.path("vnvme.toml");
        fs::write(&config, disks).unwrap();
        let (config, control) = (text(&config), text(&place.path("control")));
        let args = ["--config", &config, "--control", &control];
        let daemon = start(
            &place,
            &[&["daemon", "--keeper", "process"], &args[..]].concat(),
        );
        let client = Client::new(vec![place.path("control")]).unwrap();
        eventually("it answers", || client.disks().is_ok());
        Self {
            place,
            daemon,
            client,
        }
    }

    fn host(&self, name: &str) -> Host {
        Host::up(&self.place.path(&format!("{name}.sock")))
    }

    /// Why a disk is not served, if it is not.
    fn error(&self, name: &str) -> Option<String> {
        self.client.disk(name).unwrap().error
    }

    /// Kills the process that serves; the next one answers when this returns.
    fn kill(&self) {
        kill_serving(&self.daemon);
        eventually("the next process answers", || self.client.disks().is_ok());
    }
}

/// Guests write into their disks whatever they like: also that they are images.
#[test]
fn raw_disk_with_image_signature_is_served_after_kill() {
    let place = Place::new();
    let files = ["a.raw", "b.raw"].map(|name| place.disk(name, 1 << 20));
    let disks = ["a", "b"].iter().zip(&files);
    let disks: String = disks
        .map(|(name, file)| controller(&place, name, &[file], ""))
        .collect();
    let domain = Domain::start(place, &disks);
    let (mut guest, mut other) = (domain.host("a"), domain.host("b"));
    other.write(1, 0, &pattern(1, 4096));
    for signature in [
        &b"QFI\xfb\x00\x00\x00\x03"[..],
        b"KDMV\x01\x00\x00\x00",
        b"COWD\x01\x00\x00\x00",
        b"vhdxfile",
        b"conectix",
        b"QED\0",
        b"LUKS\xba\xbe\x00\x01",
    ] {
        let mut block = vec![0; 4096];
        block[..signature.len()].copy_from_slice(signature);
        guest.write(1, 0, &block);
        domain.kill();
        assert_eq!((domain.error("a"), domain.error("b")), (None, None));
        assert!(guest.read(1, 0, 4096) == block, "{signature:?}");
        assert!(other.read(1, 0, 4096) == pattern(1, 4096));
    }
    drop((guest, other));
    domain.daemon.end();
}
