-- uses: doors
-- All processes that are let in.
local rows = {}
for _, host in ipairs(redis.call('SMEMBERS', ADMITTED)) do
  for _, role in ipairs(a.roles) do
    for public, shown in pairs(hash(door(role, host))) do
      if not is_bulk(public) then
        rows[#rows + 1] = {role = role, host = host, public = public,
          name = string.match(shown, ' (.*)$') or shown}
      end
    end
  end
end
return cjson.encode({rows = rows})
