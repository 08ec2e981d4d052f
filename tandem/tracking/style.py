"""The style sheet of the report."""

_LIGHT = """
--page:#f6f6f4;--card:#fff;--line:#e4e4e0;--text:#1c1e21;--soft:#6a6f76;--hover:rgba(60,80,120,.10);
--c0:#2f66c9;--c1:#d96f16;--c2:#2c8f5e;--c3:#b1418c;--c4:#1788a2;--c5:#9c7a00;--c6:#c5413a;--c7:#7156c6;
"""
_DARK = """
--page:#101317;--card:#181c22;--line:#2a3038;--text:#e7e9ec;--soft:#98a0aa;--hover:rgba(160,180,220,.14);
--c0:#6ea0ff;--c1:#ff9f4d;--c2:#5fcb95;--c3:#ea83c6;--c4:#55c7df;--c5:#dcb93a;--c6:#ff7f76;--c7:#ab96ff;
"""
_SERIES = "".join(
    f".s{i}{{stroke:var(--c{i})}}circle.s{i}{{fill:var(--c{i})}}.k{i}{{background:var(--c{i})}}" for i in range(8)
)

STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
*{{box-sizing:border-box;margin:0}}
body{{background:var(--page);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}}
main{{max-width:1240px;margin:0 auto;padding:28px 20px 60px}}
header{{margin-bottom:20px}}h1{{font-size:26px;letter-spacing:-.01em;line-height:1.25;overflow-wrap:anywhere}}
header p,.tiles span,.gain span{{color:var(--soft)}}
h2{{font-size:17px;margin:34px 0 12px}}h3{{font-size:14px;color:var(--soft);margin:20px 0 8px}}
figure,article,details,.tiles div,.gain{{background:var(--card);border:1px solid var(--line);border-radius:10px}}
.gains,.tiles{{display:grid;gap:12px;margin-top:12px}}
.gains{{grid-template-columns:repeat(auto-fit,minmax(230px,1fr))}}
.gain{{padding:14px 18px 16px}}.gain p{{font-size:24px;line-height:1.4;font-variant-numeric:tabular-nums}}
.gain b{{color:var(--c2);font-size:32px}}.gain s{{color:var(--soft);text-decoration:none}}
.gain i{{color:var(--soft);font-style:normal}}
.scale{{position:relative;height:6px;border-radius:3px;background:var(--line);margin-top:8px;overflow:hidden}}
.scale u{{position:absolute;top:0;left:0;height:100%;background:var(--soft)}}.scale .change{{background:var(--c2)}}
.tiles{{grid-template-columns:repeat(auto-fit,minmax(150px,1fr))}}
.tiles div{{padding:10px 14px;display:flex;flex-direction:column}}
.tiles b{{font-size:20px;font-variant-numeric:tabular-nums}}.tiles span{{font-size:12.5px;overflow-wrap:anywhere}}
.charts{{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(min(360px,100%),1fr))}}
figure{{padding:12px 12px 6px;display:flex;flex-direction:column}}
figcaption{{font-size:12px;color:var(--soft);display:flex;flex-wrap:wrap;gap:2px 12px;margin-bottom:auto}}
figcaption b{{flex-basis:100%;font-size:14px;color:var(--text)}}
.key i{{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:5px}}
.key em{{font-style:normal;color:var(--text);font-variant-numeric:tabular-nums}}
svg{{display:block;width:100%;height:auto;overflow:visible;margin-top:6px}}
svg text{{font-size:10.5px;fill:var(--soft);font-variant-numeric:tabular-nums}}
.x{{text-anchor:middle}}.y{{text-anchor:end}}
.grid{{stroke:var(--line)}}.zero{{stroke:var(--soft);stroke-opacity:.6}}
{_SERIES}
polyline{{stroke-width:1.7;stroke-linejoin:round;fill:none}}
.dashed{{stroke-dasharray:5 3}}.band{{fill:var(--c0);opacity:.16}}.kband{{background:var(--c0);opacity:.3}}
.constant{{font-size:12.5px;color:var(--soft);margin-top:8px;display:flex;flex-wrap:wrap;gap:0 16px}}
.constant em{{font-style:normal;color:var(--text)}}
.hit{{fill:transparent}}.hit:hover{{fill:var(--hover)}}
article{{padding:10px 14px 12px;margin-bottom:10px}}
.told{{font-size:13px;color:var(--soft);display:flex;flex-wrap:wrap;gap:0 14px}}.told b{{color:var(--text)}}
pre{{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere;
max-height:22em;overflow:auto;padding:7px 10px;border-radius:6px;margin-top:6px;border:1px solid var(--line)}}
pre.prompt{{border-color:transparent;color:var(--soft);padding:2px 0;max-height:12em}}pre em{{color:var(--soft)}}
.strip{{height:9px;margin-top:6px;border:1px solid var(--line);border-radius:3px}}
.legend{{font-size:12.5px;color:var(--soft);display:flex;align-items:center;gap:8px}}
.legend i{{width:180px;height:12px;border-radius:3px;border:1px solid var(--line);
background:linear-gradient(90deg,rgba(222,72,58,.5),transparent,rgba(56,120,220,.5))}}
details{{padding:10px 16px;margin-bottom:10px}}summary{{cursor:pointer}}
@media (max-width:600px){{main{{padding:18px 12px 40px}}h1{{font-size:21px}}.tiles{{grid-template-columns:1fr 1fr}}}}
"""
