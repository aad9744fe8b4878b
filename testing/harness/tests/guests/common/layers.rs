//! A qcow2 image of 256 MiB with three backing files. Each layer has bytes of its own that are
//! seen through the layers above it.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use harness::Guest;
use harness::cache::sha256_file;
use harness::tree::Tree;

use super::kill_loop::run;

/// Images, the lowest first.
const LAYERS: [&str; 4] = ["base", "one", "two", "top"];

/// MiB that the lowest image's own bytes begin at, and the others' after them, one MiB for each
/// image. A guest's load lies before.
const OWN: usize = 128;

/// Images of a chain, and the hashes that its backing files began with.
pub struct Layers<'a> {
    tree: &'a Tree,
    images: [String; 4],
    below: Vec<String>,
}

impl<'a> Layers<'a> {
    /// Makes the images in a directory. With `packed`, the lowest image has compressed clusters in
    /// the area of the guest's load.
    pub fn create(tree: &'a Tree, dir: &Path, packed: bool) -> Result<Self> {
        let images = LAYERS.map(|name| dir.join(name).display().to_string());
        for (number, image) in images.iter().enumerate() {
            let create = ["create", "-q", "-f", "qcow2"];
            let words = match number.checked_sub(1) {
                None => [&create[..], &[image, "256M"]].concat(),
                Some(n) => [&create[..], &["-b", &images[n], "-F", "qcow2", image]].concat(),
            };
            tree.run("qemu-img", &words)?;
            let own = format!("write -P {} {}M 1M", number + 1, OWN + number);
            tree.run("qemu-io", &["-f", "qcow2", "-c", &own, image])?;
            if number == 0 && packed {
                let fill = "write -P 9 0 32M";
                tree.run("qemu-io", &["-f", "qcow2", "-c", fill, image])?;
                let packed = format!("{image}.packed");
                let convert = ["convert", "-c", "-O", "qcow2", image, &packed];
                tree.run("qemu-img", &convert)?;
                std::fs::rename(packed, image)?;
            }
        }
        let below = images[..3].iter().map(|image| sha256_file(image.as_ref()));
        Ok(Self {
            tree,
            below: below.collect::<Result<_>>()?,
            images,
        })
    }

    /// Path of the image that a guest writes.
    pub fn top(&self) -> &str {
        &self.images[3]
    }

    /// Verifies that a guest reads each layer's own bytes.
    pub fn verify(&self, guest: &Guest) -> Result<()> {
        for (number, name) in LAYERS.iter().enumerate() {
            // `tr` deletes the bytes that are expected, so that none may be left.
            let (skip, byte) = (OWN + number, number + 1);
            run(
                guest,
                &format!(
                    "own() {{ dd if=$d bs=1M skip={skip} count=1 iflag=direct 2>/dev/null; }}
                     n=$(own | tr -d '\\00{byte}' | wc -c)
                     m=$(own | wc -c)
                     [ $n = 0 ] && [ $m = 1048576 ]"
                ),
            )
            .with_context(|| format!("the bytes of {name}"))?;
        }
        Ok(())
    }

    /// Verifies that all images are consistent and that no backing file was written.
    pub fn check(&self) -> Result<()> {
        for image in &self.images {
            self.tree.run("qemu-img", &["check", "-q", image])?;
        }
        for (image, before) in self.images.iter().zip(&self.below) {
            let now = sha256_file(image.as_ref())?;
            ensure!(now == *before, "backing file {image} was written");
        }
        Ok(())
    }
}
