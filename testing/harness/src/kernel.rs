//! The guest's kernel: Debian's stock cloud kernel, unpacked so that QEMU starts it by PVH without
//! decompressing it in the guest, and its modules.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};

use crate::elf::Elf;
use crate::tree::Tree;

/// A kernel module, unpacked.
#[derive(Clone, Debug)]
pub struct Module {
    /// Name of the module, with `_` for `-`.
    pub name: String,
    /// The `.ko` file's bytes.
    pub bytes: Vec<u8>,
    /// Names of the modules that must be loaded before it.
    pub depends: Vec<String>,
    /// Names that it may be asked for by (`fs-xfs`, `pci:v...`).
    pub aliases: Vec<String>,
}

/// The one kernel of the tree: its release (`uname -r`).
pub fn release(tree: &Tree) -> Result<String> {
    let places = ["usr/lib/modules", "lib/modules"].map(|place| tree.root().join(place));
    let dir = places.iter().find(|place| place.is_dir());
    let dir = dir.with_context(|| format!("no kernel in {}", tree.root().display()))?;
    let mut releases: Vec<String> = fs::read_dir(dir)?
        .filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned()))
        .collect();
    match (releases.pop(), releases.is_empty()) {
        (Some(release), true) => Ok(release),
        _ => bail!("{} must hold exactly one kernel", dir.display()),
    }
}

/// Unpacks the `vmlinux` out of the tree's `vmlinuz`.
pub fn vmlinux(tree: &Tree) -> Result<Vec<u8>> {
    let release = release(tree)?;
    let root = tree.root();
    let places = [
        root.join(format!("boot/vmlinuz-{release}")),
        // Newer packages have it beside its modules.
        root.join(format!("usr/lib/modules/{release}/vmlinuz")),
    ];
    let [first, _] = &places;
    let path = places.iter().find(|place| place.is_file());
    let path = path.unwrap_or(first);
    let image = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let payload = payload(&image).with_context(|| format!("{} is no bzImage", path.display()))?;
    let elf = unpack(tree, payload)?;
    if Elf::parse(&elf).is_none() {
        bail!("the payload of {} is no ELF file", path.display());
    }
    Ok(elf)
}

/// The compressed kernel within a bzImage (Documentation/arch/x86/boot.rst: `setup_sects` at
/// 0x1f1, `payload_offset` at 0x248, `payload_length` at 0x24c; the offset counts from the
/// end of the setup sectors). Its last four bytes are the unpacked size, which is not part
/// of the compressed stream.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| {
        let bytes = image.get(at..at + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?) as usize)
    };
    let sectors = match *image.get(0x1f1)? {
        0 => 4,
        n => usize::from(n),
    };
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let start = ((sectors + 1) * 512).checked_add(word(0x248)?)?;
    let end = start.checked_add(word(0x24c)?.checked_sub(4)?)?;
    image.get(start..end)
}

/// Decompresses by the magic number, with a program of the tree.
fn unpack(tree: &Tree, packed: &[u8]) -> Result<Vec<u8>> {
    const TOOLS: [(&[u8], &str); 3] = [
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\xfd7zXZ\0", "xz"),
        (b"\x7fELF", ""),
    ];
    let tool = TOOLS.iter().find(|(magic, _)| packed.starts_with(magic));
    let Some((_, tool)) = tool else {
        bail!(
            "unknown compression {:02x?}",
            packed.get(..6).unwrap_or(packed)
        );
    };
    if tool.is_empty() {
        return Ok(packed.to_vec());
    }
    let mut child = tree
        .tool(tool)?
        .arg("-dc")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {tool}"))?;
    let stdin = child.stdin.take();
    let output = std::thread::scope(|scope| {
        scope.spawn(move || {
            use std::io::Write;
            // A tool that stops reading reports the reason by its exit status.
            stdin.map(|mut pipe| pipe.write_all(packed))
        });
        child.wait_with_output()
    })?;
    if !output.status.success() {
        bail!("{tool} -dc failed: {}", output.status);
    }
    Ok(output.stdout)
}

/// The named modules and everything they depend on, in an order in which they can be loaded.
/// Modules that this kernel does not have as modules (built in, or not built) are left out.
pub fn modules(tree: &Tree, wanted: &[&str]) -> Result<Vec<Module>> {
    let root = tree.root().join("usr/lib/modules").join(release(tree)?);
    let mut files = BTreeMap::new();
    index_modules(&root.join("kernel"), &mut files)?;
    let mut loaded: Vec<Module> = Vec::new();
    for name in wanted {
        load(tree, &files, &normal(name), &mut loaded, 0)?;
    }
    Ok(loaded)
}

fn load(
    tree: &Tree,
    files: &BTreeMap<String, PathBuf>,
    name: &str,
    loaded: &mut Vec<Module>,
    depth: u32,
) -> Result<()> {
    let Some(path) = files.get(name) else {
        return Ok(());
    };
    if loaded.iter().any(|m| m.name == name) {
        return Ok(());
    }
    if depth > 16 {
        bail!("module {name}: dependencies run in a circle");
    }
    let bytes = unpack(tree, &fs::read(path)?).with_context(|| path.display().to_string())?;
    let info = Elf::parse(&bytes)
        .and_then(|elf| elf.section(".modinfo"))
        .with_context(|| format!("{} has no .modinfo", path.display()))?;
    let values = |key: &str| -> Vec<String> {
        info.split(|b| *b == 0)
            .filter_map(|entry| {
                let value = std::str::from_utf8(entry).ok()?.strip_prefix(key)?;
                Some(value.strip_prefix('=')?.to_string())
            })
            .collect()
    };
    let depends: Vec<String> = values("depends")
        .iter()
        .flat_map(|list| list.split(','))
        .filter(|name| !name.is_empty())
        .map(normal)
        .collect();
    let aliases = values("alias");
    for dependency in &depends {
        load(tree, files, dependency, loaded, depth + 1)?;
    }
    loaded.push(Module {
        name: name.to_string(),
        depends,
        aliases,
        bytes,
    });
    Ok(())
}

fn index_modules(dir: &Path, into: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            index_modules(&path, into)?;
        } else if let Some(file) = path.file_name().and_then(|f| f.to_str())
            && let Some((name, _)) = file.split_once(".ko")
        {
            into.insert(normal(name), path);
        }
    }
    Ok(())
}

/// The kernel takes `-` and `_` in module names for the same.
fn normal(name: impl AsRef<str>) -> String {
    name.as_ref().replace('-', "_")
}
