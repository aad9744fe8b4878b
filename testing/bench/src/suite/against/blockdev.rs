//! Volumes in the words of QEMU's `--blockdev`.

use super::super::rbd;
use anyhow::{Result, bail, ensure};
use load::job::size;

/// Returns the values of `--blockdev` for a volume. The last one has the node name `q`.
pub fn of(volume: &str) -> Result<Vec<String>> {
    let (name, query) = volume.rsplit_once('?').unwrap_or((volume, ""));
    let (scheme, name) = name.split_once("://").unwrap_or(("", name));
    ensure!(
        !volume.contains(','),
        "{volume}: it has a comma, which separates QEMU's options"
    );
    let file = |aio: &str| {
        format!("driver=file,node-name=f,filename={name},cache.direct=on,aio={aio},discard=unmap")
    };
    Ok(match (scheme, query) {
        ("null", "") => {
            let bytes = size(name).map_err(anyhow::Error::msg)?;
            vec![format!(
                "driver=null-co,node-name=q,size={bytes},read-zeroes=on"
            )]
        }
        ("" | "file", "") => vec![
            file("io_uring"),
            "driver=raw,node-name=q,file=f,discard=unmap".into(),
        ],
        ("qcow2", "") | ("" | "file", "format=qcow2") => vec![
            file("io_uring"),
            "driver=qcow2,node-name=q,file=f,discard=unmap,cache.direct=on".into(),
        ],
        ("nbd", "") => {
            let (server, export) = name.split_once('/').unwrap_or((name, ""));
            let (host, port) = server.rsplit_once(':').unwrap_or((server, "10809"));
            vec![format!(
                "driver=nbd,node-name=q,server.type=inet,server.host={host},server.port={port},\
                 export={export}"
            )]
        }
        ("nbd+unix", query) if query.starts_with("socket=") && !query.contains('&') => {
            let export = name.trim_start_matches('/');
            let socket = query.trim_start_matches("socket=");
            vec![format!(
                "driver=nbd,node-name=q,server.type=unix,server.path={socket},export={export}"
            )]
        }
        ("rbd", _) => vec![rbd::blockdev(volume)?],
        _ => bail!(
            "{volume}: qemu-storage-daemon is compared on null://, file, qcow2, nbd and rbd volumes \
             without further options"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_becomes_qemu_blockdev() {
        for (volume, part) in [
            ("null://1k", "driver=null-co,node-name=q,size=1024"),
            ("/a.raw", "driver=raw,node-name=q"),
            ("file:///a.raw", "driver=raw,node-name=q"),
            ("/a?format=qcow2", "driver=qcow2,node-name=q"),
            ("qcow2:///a", "driver=qcow2,node-name=q"),
            ("nbd://h:1/e", "server.host=h,server.port=1,export=e"),
            ("nbd+unix:///e?socket=/s", "server.path=/s,export=e"),
            ("rbd://p/i", "driver=rbd"),
        ] {
            let told = of(volume).unwrap();
            assert!(told.last().unwrap().contains(part), "{volume}: {told:?}");
        }
        for volume in [
            "mem://1M",
            "null://1k?iops=5",
            "/a,b",
            "nvme+tcp://h/n/1",
            "null://x",
        ] {
            assert!(of(volume).is_err(), "{volume}");
        }
    }
}
